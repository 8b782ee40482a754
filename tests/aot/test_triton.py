"""Pallas-Triton kernels compile for an H200 at the release's shapes, shared memory included.

Compiled, not run.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.ops.sinkhorn import sinkhorn
from deepseek_jax.ops.sparse_attention import pallas_triton, reduce_rows
from tests.aot import targets

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
B, Q, H, D, N, K, WINDOW = 1, 8192, 64, 512, 32768, 512, 128


def shapes(queries=Q, heads=H, width=D, entries=N, dtype="bfloat16"):
  array = jax.ShapeDtypeStruct
  return {
    "q": array((B, queries, heads, width), dtype),
    "window_kv": array((B, queries, width), dtype),
    "entry_kv": array((B, entries, width), dtype),
    "selection": array((B, queries, K), "int32"),
    "segment_start": array((B, queries), "int32"),
    "sink": array((heads,), "float32"),
    "lse": array((B, queries, heads), "float32"),
  }


def compiled_kernels(fn, *arrays):
  """(how often the program calls Triton kernels, its temporaries in bytes)."""
  compiled = targets.compile_for(targets.h200(), fn, *arrays)
  text, memory = compiled.as_text(), compiled.memory_analysis()
  assert text is not None and memory is not None
  return text.count('custom_call_target="__gpu$xla.gpu.triton"'), memory.temp_size_in_bytes


def forward(q, window_kv, entry_kv, selection, segment_start, sink):
  plan = pallas_triton.plan(selection, entry_kv.shape[1], window=WINDOW)
  return pallas_triton.forward(
    q, window_kv, entry_kv, selection, segment_start, sink, plan, window=WINDOW
  )


def backward(q, window_kv, entry_kv, selection, segment_start, lse, delta, d_out):
  plan = pallas_triton.plan(selection, entry_kv.shape[1], window=WINDOW)
  return pallas_triton.backward(
    q, window_kv, entry_kv, selection, segment_start, plan, lse, delta, d_out, window=WINDOW
  )


@pytest.mark.parametrize("queries", [Q, 8 * Q])
def test_forward_and_teacher_compile_without_large_temporaries(queries):
  x = shapes(queries)
  kernels, temporaries = compiled_kernels(forward, *list(x.values())[:-1])
  assert kernels == 1 and temporaries < 2048 * queries + (8 << 20)  # the joined selection
  kernels, temporaries = compiled_kernels(
    pallas_triton.teacher, x["q"], x["entry_kv"], x["selection"], x["lse"]
  )
  assert kernels == 1 and temporaries < 2048 * queries + (8 << 20)


@pytest.mark.parametrize("queries", [Q, 8 * Q])
def test_backward_compiles_with_the_contributions_of_one_chunk(queries):
  x = shapes(queries)
  arrays = [x[name] for name in ("q", "window_kv", "entry_kv", "selection", "segment_start")]
  kernels, temporaries = compiled_kernels(backward, *arrays, x["lse"], x["lse"], x["q"])
  assert kernels == 5
  # Contributions and dS of 2048 queries are 1.41 GiB; the plan takes 6 KiB a query.
  assert temporaries < 1.5 * 2**30 + 8192 * queries


@pytest.mark.parametrize(
  ("heads", "width", "dtype"), [(20, 128, "bfloat16"), (8, 64, "float32"), (128, 256, "bfloat16")]
)
def test_other_heads_widths_and_dtypes_compile(heads, width, dtype):
  x = shapes(256, heads, width, 1024, dtype)
  arrays = [x[name] for name in ("q", "window_kv", "entry_kv", "selection", "segment_start")]
  assert compiled_kernels(forward, *arrays, x["sink"])[0] == 1
  assert compiled_kernels(backward, *arrays, x["lse"], x["lse"], x["q"])[0] >= 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_row_sums_of_indexer_keys_compile(dtype):
  chunk, width = 512, 128
  invert = functools.partial(reduce_rows.invert, entries=N, chunk=chunk, keys_per_query=K)
  inverse = jax.eval_shape(invert, jax.ShapeDtypeStruct((2048, K), "int32"))
  one_chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), inverse)
  rows_Rd = jax.ShapeDtypeStruct((chunk * K, width), dtype)
  acc_Md = jax.ShapeDtypeStruct((N, width), jnp.float32)
  assert compiled_kernels(reduce_rows.add_by_entry, one_chunk, rows_Rd, acc_Md)[0] == 2


@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (1, 20), (4, 1)])
def test_all_iterations_of_sinkhorn_are_one_kernel_and_its_gradient_another(streams, iterations):
  normalize = lambda x: sinkhorn(x, iterations, 1e-6, implementation="pallas_triton")
  both = lambda x, d: (normalize(x), jax.vjp(normalize, x)[1](d)[0])
  matrices = jax.ShapeDtypeStruct((B, Q, streams, streams), "float32")
  kernels, temporaries = compiled_kernels(both, matrices, matrices)
  assert kernels == 2
  assert temporaries < 1.1 * iterations * matrices.size * 4, "the iterates of the way back"
