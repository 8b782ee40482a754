"""Grouped matmul through XLA's ragged dot, which is a Mosaic kernel on TPU, gradients included."""

import jax

from deepseek_jax.ops import dispatch


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  del block_rows
  if (platform := dispatch.device().platform) != "tpu":
    # Elsewhere XLA multiplies every row with every group's matrix.
    raise NotImplementedError(f"ragged dot needs a TPU, the backend is {platform}")
  # The kernel adds up in float32 whatever it returns; asked for float32, the gradient of the
  # matrices would be a float32 array of their size.
  return jax.lax.ragged_dot(x_PK, w_GKN, group_rows_G, preferred_element_type=x_PK.dtype)
