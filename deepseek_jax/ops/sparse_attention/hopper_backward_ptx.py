"""PTX for the Hopper backward: what `hopper_ptx` has for both passes, and what only this one needs.

`hopper_backward_plain` has the same functions in plain Pallas, for interpret mode.

Legend: H heads, k keys of a block, n columns.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from deepseek_jax.ops.sparse_attention import hopper_ptx
from deepseek_jax.ops.sparse_attention.hopper_ptx import (
  arrive,
  barriers,
  chosen_rows,
  copy_half,
  fence_async_proxy,
  init_barriers,
  row_offsets,
  store_rows,
  wait,
)

__all__ = [
  "arrive",
  "barriers",
  "chosen_rows",
  "copy_half",
  "fence_async_proxy",
  "finish",
  "init_barriers",
  "mask_scores",
  "opaque_zero",
  "row_offsets",
  "start_transposed",
  "store_rows",
  "valid_keys",
  "wait",
]

_TILED_REF = plgpu.RefType(hopper_ptx.TILED)


def valid_keys(mask: hopper_ptx.KeyMask):
  """Which keys of a block exist: two words for mask_scores, the same in every thread."""
  selection = [ref for ref in mask[:1] if ref is not None]

  @hopper_ptx.inline(
    arg_types=([plgpu.RefType()] * len(selection), (hopper_ptx.SCALAR,) * 4),
    return_type=[plgpu.ShapeDtypeStruct((), jnp.int32, layout=hopper_ptx.SCALAR)] * 2,
  )
  def words(ctx, selection, mask):
    votes = hopper_ptx.valid_words(selection, *(hopper_ptx.register(x) for x in mask))
    return [mgpu.FragmentedArray.splat(vote, (), is_signed=True) for vote in votes]

  return words(selection, tuple(jnp.int32(x) for x in mask[1:]))


def mask_scores(x_Hk, low, high):
  """-inf for keys that do not exist."""

  @hopper_ptx.inline(
    arg_types=(hopper_ptx.MATRIX, hopper_ptx.SCALAR, hopper_ptx.SCALAR),
    return_type=plgpu.ShapeDtypeStruct(x_Hk.shape, jnp.float32, layout=hopper_ptx.MATRIX),
  )
  def masked(ctx, x, low, high):
    return hopper_ptx.mask_scores(x, [hopper_ptx.register(low), hopper_ptx.register(high)])

  return masked(x_Hk, low, high)


def opaque_zero():
  """int32 scalar 0 that the compiler cannot see through.

  WGMMA descriptors of fixed places in shared memory do not change in a loop: hoisted out of it,
  dozens of them are spilled, 1.5 KB per thread. Indexed with this, they are computed where used.
  """

  @hopper_ptx.inline(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=hopper_ptx.SCALAR))
  def zero(ctx):
    value = hopper_ptx.ptx("mov.b32 $0, 0;", result_types=hopper_ptx.i32_type())
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)

  return zero()


def start_transposed(lefts, rights):
  """Starts sum_i left_i^T right_i of [H, k] and [H, n] in shared memory, one group of products.

  The float32 [k, n] in registers must not be used before `finish`.

  The sum starts from a 0 that a barrier of the warpgroup returns. Were it a constant, ptxas would
  clear the registers of this sum while those of the last are still being stored, run out of them
  and make every product of the kernel wait for the one before (C7512).
  """
  columns = rights[0].shape[-1]

  @hopper_ptx.inline(
    arg_types=([_TILED_REF] * len(lefts), [_TILED_REF] * len(rights)),
    return_type=plgpu.ShapeDtypeStruct(
      (hopper_ptx.ROWS, columns), jnp.float32, layout=hopper_ptx.MATRIX
    ),
  )
  def multiply(ctx, lefts, rights):
    zeros = mgpu.FragmentedArray.splat(
      _barrier_zero(), (hopper_ptx.ROWS, columns), hopper_ptx.MATRIX.to_mgpu()
    )
    total = mgpu.WGMMAAccumulator.from_registers(zeros)
    for left, right in zip(lefts, rights, strict=True):
      total = mgpu.wgmma(total, mgpu.memref_transpose(left, (1, 0, 3, 2)), right, swizzle=128)
    nvvm.wgmma_commit_group_sync_aligned()
    return total.value

  return multiply(list(lefts), list(rights))


def finish(x_kn):
  """What start_transposed started, once its products are finished."""

  @hopper_ptx.inline(
    arg_types=(hopper_ptx.MATRIX,),
    return_type=plgpu.ShapeDtypeStruct(x_kn.shape, jnp.float32, layout=hopper_ptx.MATRIX),
  )
  def wait_for(ctx, x):
    nvvm.wgmma_wait_group_sync_aligned(0)
    return fragmented_array.optimization_barrier(x)

  return wait_for(x_kn)


def _barrier_zero():
  """Waits for the threads of the warpgroup and counts those for which false holds."""
  number = arith.addi(arith.shrui(utils.thread_idx(), hopper_ptx.const32(7)), hopper_ptx.const32(1))
  text = (
    "{ .reg .pred p; .reg .b32 n; setp.ne.b32 p, 0, 0;"
    " bar.red.popc.u32 n, $1, 128, p; mov.b32 $0, n; }"
  )
  return hopper_ptx.ptx(text, number, result_types=ir.F32Type.get(), convergent=True)
