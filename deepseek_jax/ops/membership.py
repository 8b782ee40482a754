"""A list of ids per query as a mask over all ids.

Legend: B rows, C queries, K ids in a list, N ids there are.
"""

import jax
import jax.numpy as jnp


def is_member(ids_BCK: jax.Array, count: int) -> jax.Array:
  """[B,C,K] int32 ids, -1 for none -> [B,C,N] bool with N = count."""
  rows, queries, _ = ids_BCK.shape
  kept_BCK = jnp.where(ids_BCK >= 0, ids_BCK, count)  # one past the end is dropped
  row, query = jnp.arange(rows)[:, None, None], jnp.arange(queries)[:, None]
  empty_BCN = jnp.zeros((rows, queries, count), bool)
  return empty_BCN.at[row, query, kept_BCK].set(True, mode="drop")
