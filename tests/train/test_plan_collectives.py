"""Collectives that a compiled program runs, counted with its loops and in bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from train.plan_collectives import collectives

DEVICES, LAYERS, ROWS, COLUMNS = 8, 5, 32, 16


def compiled_text():
  """A scan that gathers a weight in each step, then one of every other collective."""
  mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
  neighbour = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]

  def program(x, weights):
    def layer(x, weight):
      whole = jax.lax.all_gather(weight, "x", tiled=True)
      return jnp.tanh(x @ whole), None

    x, _ = jax.lax.scan(layer, x, weights)
    total = jax.lax.psum(x, "x")
    part = jax.lax.psum_scatter(jnp.sin(x), "x", tiled=True)
    exchanged = jax.lax.all_to_all(x, "x", 0, 0, tiled=True)
    return total, part, exchanged, jax.lax.ppermute(x, "x", neighbour)

  split, whole = PartitionSpec("x"), PartitionSpec()
  sharded = jax.shard_map(
    program,
    mesh=mesh,
    in_specs=(split, PartitionSpec(None, "x")),
    out_specs=(whole, split, split, split),
    check_vma=False,
  )
  x = jax.ShapeDtypeStruct((DEVICES * ROWS, COLUMNS), jnp.float32)
  weights = jax.ShapeDtypeStruct((LAYERS, COLUMNS, COLUMNS), jnp.float32)
  return jax.jit(sharded).lower(x, weights).compile().as_text()


def test_a_collective_in_a_loop_counts_as_often_as_it_runs():
  found, array = collectives(compiled_text()), ROWS * COLUMNS * 4
  assert found["all-gather"] == {"count": LAYERS, "bytes": LAYERS * COLUMNS * COLUMNS * 4}
  once = {"count": 1, "bytes": array}
  for kind in ("all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
    assert found[kind] == once, kind
  assert len(found) == 5


TPU_PROGRAM = """HloModule step

%condition (c.1: (s32[], bf16[8,4])) -> pred[] {
  %c.1 = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) parameter(0)
  %bound = s32[]{:T(128)} constant(6), metadata={op_name="jit(step)"}
  %index = s32[]{:T(128)} get-tuple-element(%c.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%index, %bound), direction=LT
}

%body (b.1: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %b.1 = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) parameter(0)
  %index.2 = s32[]{:T(128)} get-tuple-element(%b.1), index=0
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%b.1), index=1
  %start = ((bf16[8,4]{1,0:T(8,128)(2,1)}), bf16[32,4]{1,0:T(8,128)(2,1)}) all-gather-start(%x), dimensions={0}
  %done = bf16[32,4]{1,0:T(8,128)(2,1)} all-gather-done(%start)
  %moved = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x)
  %arrived = bf16[8,4]{1,0:T(8,128)(2,1)} collective-permute-done(%moved)
  ROOT %next = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) tuple(%index.2, %arrived)
}

ENTRY %main (p.1: bf16[8,4]) -> bf16[8,4] {
  %p.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start.2 = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) tuple(%zero, %p.1)
  %loop = (s32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}) while(%start.2), condition=%condition, body=%body
  ROOT %out = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_tpu_program_tells_its_loop_counts_by_the_condition():
  assert collectives(TPU_PROGRAM) == {
    "all-gather": {"count": 6, "bytes": 6 * 32 * 4 * 2},
    "collective-permute": {"count": 6, "bytes": 6 * 8 * 4 * 2},
  }


@pytest.mark.parametrize("bound", ["s32[] get-tuple-element(%c.1), index=0", "s32[] add(%a, %b)"])
def test_a_loop_of_unknown_length_counts_once(bound):
  lines = TPU_PROGRAM.splitlines()
  place = next(number for number, line in enumerate(lines) if "constant(6)" in line)
  lines[place] = f"  %bound = {bound}"
  assert collectives("\n".join(lines))["all-gather"]["count"] == 1
