"""The Hopper kernel of the backward pass compiles for an H200 at the release's shapes, registers,
shared memory and temporaries included.

Compiled, not run.

Legend: S queries, M entries, H heads, d head width, K chosen entries.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.ops.sparse_attention import hopper_backward, reduce_rows, tiles
from tests.aot import targets

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
H, D, WINDOW = 64, 512, 128


def shapes(queries: int, entries: int, top_k: int):
  array = jax.ShapeDtypeStruct
  wide, per_head = array((queries, H, D), jnp.bfloat16), array((queries, H), jnp.float32)
  chosen = (None, None)
  inverse = None
  if top_k:
    selection = array((queries, top_k), jnp.int32)
    chosen = (array((entries, D), jnp.bfloat16), selection)
    invert = lambda selection_SK: reduce_rows.invert(
      selection_SK, entries, chunk=tiles.BACKWARD_QUERIES, keys_per_query=top_k + WINDOW
    )
    inverse = jax.eval_shape(invert, selection)
  window_kv, first = array((queries, D), jnp.bfloat16), array((queries,), jnp.int32)
  return wide, window_kv, *chosen, first, inverse, per_head, per_head, wide


@pytest.mark.parametrize(
  ("queries", "entries", "top_k"),
  [(16384, 32768, 512), (65536, 65536, 512), (8192, 0, 0), (301, 999, 64)],
)
def test_products_stay_asynchronous_and_contributions_are_all_the_memory(
  queries, entries, top_k, tmp_path, monkeypatch
):
  monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
  backward = lambda *arrays: hopper_backward.backward(
    *arrays, window=WINDOW, chunk=tiles.BACKWARD_QUERIES
  )
  compiled = targets.compile_for(targets.h200(), backward, *shapes(queries, entries, top_k))
  # Rows of 1 KiB; a second copy of them, or of dQ, would show.
  rows = min(queries, tiles.BACKWARD_QUERIES) * (top_k + WINDOW) * 1024
  pieces = tiles.BACKWARD_QUERIES * top_k // reduce_rows.PIECE_ROWS * D * 4
  memory = compiled.memory_analysis()
  assert memory is not None and memory.temp_size_in_bytes < 1.05 * (rows + pieces) + 2**22
  (report,) = tmp_path.glob("*.ptxas")
  text = report.read_text()
  # Products made to wait for each other, or for registers.
  assert not re.search(r"C75(10|12|17)|C7602", text), text
  assert re.findall(r"(\d+) bytes spill stores", text) == ["0"]
