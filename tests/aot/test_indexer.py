"""The indexer's kernels compiled for chips that are not here, at the sizes of the release.

Compiled is not run: this finds what a compiler refuses and how much memory a program wants.
"""

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.ops.indexer import Choice, Visible, chosen, pallas_gpu, pallas_tpu, tiles, xla
from tests.aot import targets

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

HEADS, WIDTH, TOP_K, BLOCKS = 32, 128, 512, 2048
LONG = 65536  # slots of a long context; entries too where the ratio is 1
TEMPORARY_BYTES = 2e9  # scores of all pairs, 64K by 64K in float32, would be 17 GB

CHOICES = {
  "plain": Choice(top_k=TOP_K),
  "publish": Choice(top_k=TOP_K, publish_blocks=BLOCKS, block_size=8, scores_bf16=True),
  "restrict": Choice(top_k=TOP_K, block_size=8),
}


def arrays(queries, entries, pool: bool, dtype=jnp.bfloat16):
  """Shapes of queries, keys, head weights, existence, begin, end and perhaps a pool."""
  shape, number = jax.ShapeDtypeStruct, jnp.int32
  return (
    shape((1, queries, HEADS, WIDTH), dtype),
    shape((1, entries, WIDTH), dtype),
    shape((1, queries, HEADS), dtype),
    shape((1, entries), bool),
    shape((1, queries), number),
    shape((1, queries), number),
    *([shape((1, queries, BLOCKS), number)] if pool else []),
  )


def temporaries(target, select, name, queries, entries, dtype=jnp.bfloat16):
  """Bytes that the compiled program takes beside its arguments and results."""

  def fn(q, keys, weights, exists, begin, end, pool=None):
    seen = Visible(exists, begin, end)
    return select(q, keys, weights, seen, CHOICES[name], pool_BQW=pool)[:2]

  shapes = arrays(queries, entries, name == "restrict", dtype)
  compiled = targets.compile_for(target, fn, *shapes)
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", CHOICES)
def test_the_gpu_kernels_choose_among_64k_entries_in_bounded_memory(name):
  assert temporaries(targets.h200(), pallas_gpu.select, name, LONG, LONG) < TEMPORARY_BYTES


def test_the_gpu_kernels_score_pool_members_alone_in_a_longer_context():
  entries = 16 * LONG
  assert tiles.scores_members("pallas_gpu", entries, 8 * BLOCKS)
  got = temporaries(targets.h200(), pallas_gpu.select, "restrict", 4096, entries)
  assert got < TEMPORARY_BYTES


def test_the_gpu_kernels_narrow_rows_of_a_million_entries_in_rounds():
  got = temporaries(targets.h200(), pallas_gpu.select, "publish", 1024, 16 * LONG)
  assert got < TEMPORARY_BYTES


def test_the_gpu_kernels_take_float32():
  got = temporaries(targets.h200(), pallas_gpu.select, "plain", 4096, 4096, jnp.float32)
  assert got < TEMPORARY_BYTES


@pytest.mark.parametrize("name", CHOICES)
def test_plain_jax_chooses_among_64k_entries_in_bounded_memory(name):
  assert temporaries(targets.h200(), xla.select, name, LONG, LONG) < TEMPORARY_BYTES


# The kernel is the same for every choice; the sorts around it take long to compile.
@pytest.mark.parametrize(
  ("generation", "name"),
  [("v5p", "plain"), ("v6e", "plain"), ("tpu7x", "plain"), ("v5p", "publish"), ("v5p", "restrict")],
)
def test_the_tpu_kernel_chooses_among_64k_entries_in_bounded_memory(generation, name):
  got = temporaries(targets.tpu(generation), pallas_tpu.select, name, LONG, LONG)
  assert got < TEMPORARY_BYTES


@pytest.mark.parametrize("target", ["h200", "v5p"])
def test_divergence_over_64k_queries_and_its_gradient_take_bounded_memory(target):
  mesh = targets.h200() if target == "h200" else targets.tpu(target)
  op = chosen.by_sorted_rows if target == "h200" else chosen.by_scatter
  q, keys, weights, *_ = arrays(LONG, LONG, pool=False)
  shape = jax.ShapeDtypeStruct
  rest = (
    shape((1, LONG, TOP_K), jnp.int32),
    shape((1, LONG, TOP_K), jnp.float32),
    shape((1, LONG), bool),
  )
  compiled = targets.compile_for(mesh, jax.value_and_grad(op, (0, 1, 2)), q, keys, weights, *rest)
  assert compiled.memory_analysis().temp_size_in_bytes < TEMPORARY_BYTES
