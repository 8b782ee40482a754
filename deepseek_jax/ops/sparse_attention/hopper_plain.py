"""What `hopper_ptx` does, in plain Pallas, for the interpret mode of Mosaic GPU on a CPU.

The same functions with the same meaning, one warpgroup at a time instead of one thread: row numbers
are an array of 64, key masks one of 64 booleans, and every barrier counts warpgroups.

Legend: see hopper_ptx.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64


def barriers(number: int):
  return plgpu.Barrier(num_barriers=number)


def init_barriers(barriers_ref, arrivals) -> None:
  del barriers_ref, arrivals  # the scratch is ready for use


def wait(barriers_ref, index, parity) -> None:
  del parity  # the interpreter counts
  plgpu.barrier_wait(barriers_ref.at[index])


def arrive(barriers_ref, index) -> None:
  plgpu.barrier_arrive(barriers_ref.at[index])


def fence_async_proxy() -> None:
  plgpu.commit_smem()


def row_offsets():
  return jnp.arange(ROWS, dtype=jnp.int32)


def chosen_rows(selection_SK_ref, query, block, active, otherwise_R):
  return jnp.where(active != 0, _choice(selection_SK_ref, query, block), otherwise_R)


def _choice(selection_SK_ref, query, block):
  block = jnp.clip(block, 0, selection_SK_ref.shape[1] // ROWS - 1)  # it is not always looked at
  return selection_SK_ref[query, pl.ds(block * ROWS, ROWS)]


def copy_half(tables_refs, table, rows_R, ring_ref, slot, half, barriers_ref, barrier) -> None:
  width = ring_ref.shape[-1]
  columns = slice(half * width // 2, (half + 1) * width // 2)
  halves = [ref[...].reshape(-1, width)[:, columns] for ref in tables_refs]
  copies = [table_Md[jnp.clip(rows_R, 0, table_Md.shape[0] - 1)] for table_Md in halves]
  copy = lax.select_n(table, *copies)
  copy = jnp.where(rows_R[:, None] >= 0, copy, jnp.zeros_like(copy))
  ring_ref[slot, :, pl.ds(half * width // 2, width // 2)] = copy
  for quarter in (2 * half, 2 * half + 1):
    plgpu.barrier_arrive(barriers_ref.at[barrier + quarter])


def score_block(chunks, rest_ref, keys_kd_ref, full, mask):
  barriers_ref, barrier, _ = full
  x_Hk = jnp.float32(0)
  for number in range(len(chunks) + rest_ref.shape[0]):
    if number % 2 == 0:
      plgpu.barrier_wait(barriers_ref.at[barrier + number // 2])
    chunk = chunks[number] if number < len(chunks) else rest_ref[number - len(chunks)]
    keys_kd = keys_kd_ref[:, pl.ds(ROWS * number, ROWS)]
    x_Hk += jnp.dot(chunk, keys_kd.T, preferred_element_type=jnp.float32)
  valid_k = jnp.arange(ROWS) >= mask.skip
  if mask.selection_SK_ref is not None:
    chosen_k = _choice(mask.selection_SK_ref, mask.query, mask.block) >= 0
    valid_k = jnp.where(mask.chosen != 0, chosen_k, valid_k)
  return jnp.where(valid_k, x_Hk, -jnp.inf)


def rescale(accumulators, factor_H):
  return [a * factor_H[:, None] for a in accumulators]


def accumulate(accumulators, p_Hk_ref, values_refs):
  p_Hk = p_Hk_ref[...]
  products = [jnp.dot(p_Hk, v[...], preferred_element_type=jnp.float32) for v in values_refs]
  return [a + product for a, product in zip(accumulators, products, strict=True)]


def store_rows(x_Hn, out_ref, query, column: int) -> None:
  out_ref[query, :, pl.ds(column, x_Hn.shape[1])] = x_Hn
