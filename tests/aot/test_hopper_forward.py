"""The Hopper kernel of the forward pass compiles for an H200 at the release's shapes, registers and
shared memory included.

Compiled, not run.

Legend: S queries, M entries, H heads, d head width, K chosen entries.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.ops.sparse_attention import hopper_forward
from tests.aot import targets

pytestmark = pytest.mark.slow
H, D, WINDOW = 64, 512, 128
SPILLED_BYTES = 32  # per thread; a few words outside the loops over blocks


def shapes(queries: int, entries: int, top_k: int):
  array = jax.ShapeDtypeStruct
  chosen = (array((entries, D), jnp.bfloat16), array((queries, top_k), jnp.int32))
  return (
    array((queries, H, D), jnp.bfloat16), array((queries, D), jnp.bfloat16),
    *(chosen if top_k else (None, None)),
    array((queries,), jnp.int32), array((H,), jnp.float32),
  )  # fmt: skip


@pytest.mark.parametrize(
  ("queries", "entries", "top_k"),
  [(16384, 32768, 512), (65536, 65536, 512), (16384, 0, 0), (7, 9, 64)],
)
def test_products_stay_asynchronous_and_registers_suffice(
  queries, entries, top_k, tmp_path, monkeypatch
):
  monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
  forward = lambda *arrays: hopper_forward.forward(*arrays, window=WINDOW)
  compiled = targets.compile_for(targets.h200(), forward, *shapes(queries, entries, top_k))
  memory = compiled.memory_analysis()
  assert memory is not None and memory.temp_size_in_bytes < 2**20 + 8 * queries
  (report,) = tmp_path.glob("*.ptxas")
  text = report.read_text()
  # Products made to wait for each other, or for registers.
  assert not re.search(r"C75(10|12|17)|C7602", text), text
  assert max(map(int, re.findall(r"(\d+) bytes spill stores", text))) <= SPILLED_BYTES, text
