"""Rows of a table, by number.

Legend: X axes of the numbers, R looked-up rows, h channels of a row, B rows of the batch, N rows of
its own that each of them has.
"""

import jax
import jax.numpy as jnp


def table_lookup(table: jax.Array, rows_XR: jax.Array, dtype) -> jax.Array:
  """[X, R, h] rows of the table in `dtype`; row -1 reads zeros and has no gradient."""
  taken = table[jnp.maximum(rows_XR, 0)].astype(dtype)
  return jnp.where((rows_XR >= 0)[..., None], taken, 0)


def take_own(x_BN: jax.Array, id_BX: jax.Array) -> jax.Array:
  """[B, X, ...]: x[b, id[b]] for every row b of the batch; -1 reads row 0, to be masked."""
  return jax.vmap(lambda x_N, id_X: x_N[jnp.maximum(id_X, 0)])(x_BN, id_BX)
