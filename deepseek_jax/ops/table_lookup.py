"""Rows of a large table.

Legend: X leading axes, R looked-up rows, h channels of a row.
"""

import jax
import jax.numpy as jnp


def table_lookup(table: jax.Array, rows_XR: jax.Array, dtype) -> jax.Array:
  """[X, R, h] rows of the table in `dtype`; row -1 reads zeros and has no gradient."""
  taken = table[jnp.maximum(rows_XR, 0)].astype(dtype)
  return jnp.where((rows_XR >= 0)[..., None], taken, 0)
