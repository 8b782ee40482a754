"""Grouped matmul as one batched matmul over blocks of rows: works everywhere, wastes no product.

Legend: P rows, G groups, K input width, N output width, C blocks.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  blocks = x_PK.shape[0] // block_rows
  ends_G = jnp.cumsum(group_rows_G)
  group_C = jnp.searchsorted(ends_G, jnp.arange(blocks) * block_rows, side="right")
  w_CKN = w_GKN[jnp.minimum(group_C, w_GKN.shape[0] - 1)]
  x_CRK = x_PK.reshape(blocks, block_rows, -1)
  y_CRN = jax.lax.dot_general(
    x_CRK, w_CKN, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
  )
  return y_CRN.reshape(x_PK.shape[0], -1).astype(x_PK.dtype)
