"""Grouped matmul as one batched float32 matmul over blocks of rows, each with a copy of its matrix.

Legend: P rows, G groups, K input width, N output width, C blocks, R rows of a block.
"""

import jax.numpy as jnp


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  blocks = x_PK.shape[0] // block_rows
  w_CKN = w_GKN.astype(jnp.float32)[group_of_blocks(group_rows_G, blocks, block_rows)]
  x_CRK = x_PK.astype(jnp.float32).reshape(blocks, block_rows, -1)
  y_CRN = jnp.einsum("crk,ckn->crn", x_CRK, w_CKN)
  return y_CRN.reshape(x_PK.shape[0], -1).astype(x_PK.dtype)


def group_of_blocks(group_rows_G, blocks: int, block_rows: int):
  """[C] group of every block of rows; blocks past the last group, all zeros, count to the last."""
  ends_G = jnp.cumsum(group_rows_G)
  group_C = jnp.searchsorted(ends_G, jnp.arange(blocks) * block_rows, side="right")
  return jnp.minimum(group_C, group_rows_G.shape[0] - 1)
