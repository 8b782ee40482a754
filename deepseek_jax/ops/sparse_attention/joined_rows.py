"""The rows of a batch as one sequence, which is what the GPU kernels see.

Legend: B rows, Q queries, K chosen entries, L = K filled up to whole blocks, N entry cells of a
row, S = B Q queries of all rows.
"""

import jax
import jax.numpy as jnp


def join(x_BQ: jax.Array) -> jax.Array:
  """[B, Q, ...] -> [B Q, ...]."""
  return x_BQ.reshape(x_BQ.shape[0] * x_BQ.shape[1], *x_BQ.shape[2:])


def join_selection(selection_BQK: jax.Array, entries: int, *, block: int) -> jax.Array:
  """[S, L] int32 ids into the entries of all rows; L is a multiple of block, filled with -1.

  Args:
    selection_BQK: int32 ids into the entries of their own row, -1 at the end.
    entries: N.
    block: keys that a kernel takes at a time.
  """
  rows, _, top_k = selection_BQK.shape
  offset_B11 = (jnp.arange(rows, dtype=jnp.int32) * entries)[:, None, None]
  selection_SK = join(jnp.where(selection_BQK >= 0, selection_BQK + offset_B11, -1))
  return jnp.pad(selection_SK, ((0, 0), (0, -top_k % block)), constant_values=-1)


def first_window_slot(segment_start_BQ: jax.Array, window: int) -> jax.Array:
  """[S] int32 first slot of all rows' slots that a query's window reaches.

  A query that sees nothing may start in the next row: its own slot is then before its first.
  """
  rows, queries = segment_start_BQ.shape
  slot_Q = jnp.arange(queries, dtype=jnp.int32)
  first_BQ = jnp.maximum(segment_start_BQ, slot_Q - (window - 1))
  row_B1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
  return (first_BQ + row_B1 * queries).reshape(-1)
