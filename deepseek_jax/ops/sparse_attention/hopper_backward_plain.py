"""What `hopper_backward_ptx` does, in plain Pallas, for the interpret mode of Mosaic GPU on a CPU.

Legend: H heads, k keys of a block.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops.sparse_attention import hopper_ptx
from deepseek_jax.ops.sparse_attention.hopper_plain import (
  ROWS,
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


def valid_keys(mask: hopper_ptx.KeyMask):
  inside_k = jnp.arange(ROWS) >= mask.skip
  if mask.selection_SK_ref is None:
    return (inside_k,)
  blocks = mask.selection_SK_ref.shape[1] // ROWS
  block = jnp.clip(mask.block, 0, blocks - 1)  # it is not always looked at
  chosen_k = mask.selection_SK_ref[mask.query, pl.ds(block * ROWS, ROWS)]
  return (jnp.where(mask.chosen != 0, chosen_k >= 0, inside_k),)


def mask_scores(x_Hk, valid_k):
  return jnp.where(valid_k, x_Hk, -jnp.inf)


def opaque_zero():
  return jnp.int32(0)


def start_transposed(lefts, rights):
  dot = lambda left, right: jnp.dot(left.T, right, preferred_element_type=jnp.float32)
  return sum(dot(left[...], right[...]) for left, right in zip(lefts, rights, strict=True))


def finish(x_kn):
  plgpu.commit_smem()  # these products read through the generic proxy, unlike the real ones
  return x_kn
