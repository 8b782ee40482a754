"""Grouped matmul as one batched matmul over blocks of rows: works everywhere, wastes no product.

Legend: P rows, G groups, K input width, N output width, C blocks.
"""

import jax.numpy as jnp

from deepseek_jax.ops.matmul import einsum_f32


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  blocks = x_PK.shape[0] // block_rows
  ends_G = jnp.cumsum(group_rows_G)
  group_C = jnp.searchsorted(ends_G, jnp.arange(blocks) * block_rows, side="right")
  w_CKN = w_GKN[jnp.minimum(group_C, w_GKN.shape[0] - 1)]
  x_CRK = x_PK.reshape(blocks, block_rows, -1)
  y_CRN = einsum_f32("crk,ckn->crn", x_CRK, w_CKN)
  return y_CRN.reshape(x_PK.shape[0], -1).astype(x_PK.dtype)
