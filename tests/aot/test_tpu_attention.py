"""The TPU's sparse attention compiles for v5p, v6e and tpu7x at the shapes of the release.

Compiled is not run: this shows that rows, tiles and memories are what the compiler accepts, and how
much memory the programs take, nothing of time or values.
"""

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.ops.sparse_attention import pallas_tpu
from tests.aot import targets

pytestmark = pytest.mark.slow
pytest.importorskip("libtpu")

QUERIES, HEADS, WIDTH, TOP_K, WINDOW = 8192, 64, 512, 512, 128
MIB = 2**20


def compiled(generation, entries, which, heads=HEADS):
  """One pass over one row of the batch."""
  struct = jax.ShapeDtypeStruct
  q = struct((1, QUERIES, heads, WIDTH), jnp.bfloat16)
  window_kv = struct((1, QUERIES, WIDTH), jnp.bfloat16)
  segment_start = struct((1, QUERIES), jnp.int32)
  sink, statistic = struct((heads,), jnp.float32), struct((1, QUERIES, heads), jnp.float32)
  entry_kv = selection = None
  if entries:
    entry_kv = struct((1, entries, WIDTH), jnp.bfloat16)
    selection = struct((1, QUERIES, TOP_K), jnp.int32)
  plan = None
  if entries:
    make = lambda ids: pallas_tpu.plan(ids, entries, window=WINDOW)
    with targets.tracing_for(targets.tpu(generation)):
      plan = jax.eval_shape(make, selection)

  def forward(q, window_kv, entry_kv, selection, segment_start, sink, plan):
    pallas_tpu.require(q, WINDOW)
    arrays = (q, window_kv, entry_kv, selection, segment_start, sink, plan)
    return pallas_tpu.forward(*arrays, window=WINDOW)

  backward = lambda *arrays: pallas_tpu.backward(*arrays, window=WINDOW)
  shared = (q, window_kv, entry_kv, selection, segment_start)
  if which == "forward":
    return targets.compile_for(targets.tpu(generation), forward, *shared, sink, plan)
  arrays = (*shared, plan, statistic, statistic, q)
  return targets.compile_for(targets.tpu(generation), backward, *arrays)


# Temporaries: the lists with places of a chunk (2 x 16 MiB for each), the packed table, and the
# sums of entries of each core and chunk.
@pytest.mark.parametrize("generation", ["v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize(
  ("which", "limit"), [("forward", 256 * MIB), ("backward", 512 * MIB)], ids=lambda x: str(x)
)
def test_a_table_of_32768_entries_compiles_and_needs_little_beside_its_arguments(
  generation, which, limit
):
  memory = compiled(generation, 32768, which).memory_analysis()
  assert memory.temp_size_in_bytes <= limit


@pytest.mark.parametrize(("generation", "which"), [("v5p", "forward"), ("tpu7x", "backward")])
def test_a_table_of_65536_entries_compiles_in_chunks(generation, which):
  memory = compiled(generation, 65536, which).memory_analysis()
  assert memory.temp_size_in_bytes <= 1024 * MIB


@pytest.mark.parametrize("generation", ["v5p", "v6e", "tpu7x"])
def test_the_window_alone_compiles(generation):
  for which in ("forward", "backward"):
    assert compiled(generation, 0, which).memory_analysis().temp_size_in_bytes <= 128 * MIB


def test_fewer_heads_compile():
  for which in ("forward", "backward"):
    assert compiled("v6e", 4096, which, heads=16).memory_analysis().temp_size_in_bytes > 0


@pytest.mark.parametrize("generation", ["v5p", "v6e", "tpu7x"])
def test_the_plan_compiles_and_needs_little_beside_its_result(generation):
  selection = jax.ShapeDtypeStruct((1, QUERIES, TOP_K), jnp.int32)
  make = lambda ids: pallas_tpu.plan(ids, 32768, window=WINDOW)
  memory = targets.compile_for(targets.tpu(generation), make, selection).memory_analysis()
  assert memory.temp_size_in_bytes <= 96 * MIB
