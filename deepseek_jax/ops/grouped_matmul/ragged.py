"""Grouped matmul through XLA's ragged dot, which is a real grouped product on TPU only."""

import jax
import jax.numpy as jnp


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  del block_rows
  if jax.default_backend() != "tpu":
    # Elsewhere XLA multiplies every row with every group's matrix.
    raise NotImplementedError(f"ragged dot needs a TPU, the backend is {jax.default_backend()}")
  y = jax.lax.ragged_dot(x_PK, w_GKN, group_rows_G, preferred_element_type=jnp.float32)
  return y.astype(x_PK.dtype)
