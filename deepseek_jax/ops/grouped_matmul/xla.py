"""Grouped matmul in plain JAX that never holds many copies of matrices.

Small matrices are copied out, one for every block of rows, and multiplied in one batch. Where the
copies would be large, a loop over the blocks reads each matrix in place.

Legend: P rows, G groups, K input width, N output width, C blocks, R rows of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from deepseek_jax.ops.grouped_matmul import reference
from deepseek_jax.ops.matmul import einsum_f32

# 64 MiB of copies cost less than the steps of a loop; the small configurations stay below.
_COPIED_BYTES = 1 << 26


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  blocks = x_PK.shape[0] // block_rows
  group_C = reference.group_of_blocks(group_rows_G, blocks, block_rows)
  matrix_bytes = w_GKN.shape[1] * w_GKN.shape[2] * w_GKN.dtype.itemsize
  return _grouped_matmul(x_PK, w_GKN, group_C, blocks * matrix_bytes <= _COPIED_BYTES)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x_PK, w_GKN, group_C, in_one_batch: bool):
  return _times_matrices("rk,kn->rn", x_PK, w_GKN, group_C, in_one_batch)


def _forward(x_PK, w_GKN, group_C, in_one_batch):
  y_PN = _grouped_matmul(x_PK, w_GKN, group_C, in_one_batch)
  return y_PN, (x_PK, w_GKN, group_C)


def _backward(in_one_batch, saved, d_y_PN):
  x_PK, w_GKN, group_C = saved
  d_x_PK = _times_matrices("rn,kn->rk", d_y_PN, w_GKN, group_C, in_one_batch)
  x_CRK, d_y_CRN = _blocks(x_PK, group_C), _blocks(d_y_PN, group_C)
  if in_one_batch:
    d_w_CKN = einsum_f32("crk,crn->ckn", x_CRK, d_y_CRN)
    # No segment_sum: of sorted indices XLA makes a GPU kernel that takes minutes to compile (one
    # with a whole matrix in registers), of others one that adds in any order.
    is_of_CG = jax.nn.one_hot(group_C, len(w_GKN))
    d_w_GKN = jnp.einsum("cg,ckn->gkn", is_of_CG, d_w_CKN, precision=lax.Precision.HIGHEST)
    return d_x_PK, d_w_GKN.astype(w_GKN.dtype), None
  return d_x_PK, _sum_in_a_loop(x_CRK, d_y_CRN, group_C, w_GKN), None


_grouped_matmul.defvjp(_forward, _backward)


def _blocks(x_PK, group_C):
  return x_PK.reshape(len(group_C), -1, x_PK.shape[1])


def _times_matrices(product: str, x_PK, w_GKN, group_C, in_one_batch):
  """Rows of each block times its matrix or, as `product` says, times its transpose."""
  if in_one_batch:
    batched = ",".join("c" + operand for operand in product.split(",")).replace("->", "->c")
    y_CRN = einsum_f32(batched, _blocks(x_PK, group_C), w_GKN[group_C])
  else:
    matrix = lambda group: lax.dynamic_index_in_dim(w_GKN, group, keepdims=False)
    multiply = lambda piece: einsum_f32(product, piece[0], matrix(piece[1])).astype(x_PK.dtype)
    y_CRN = lax.map(multiply, (_blocks(x_PK, group_C), group_C))
  return y_CRN.reshape(len(x_PK), -1).astype(x_PK.dtype)


def _sum_in_a_loop(x_CRK, d_y_CRN, group_C, w_GKN):
  """Gradient of the matrices: one float32 matrix adds up over the blocks of a group.

  The sum is written after every block, since a step cannot know that it is its group's last.
  """

  def block(carry, piece):
    d_w_GKN, sum_KN, before = carry
    x_RK, d_y_RN, group = piece
    sum_KN = jnp.where(group == before, sum_KN, 0.0) + einsum_f32("rk,rn->kn", x_RK, d_y_RN)
    d_w_GKN = lax.dynamic_update_index_in_dim(d_w_GKN, sum_KN.astype(d_w_GKN.dtype), group, axis=0)
    return (d_w_GKN, sum_KN, group), None

  start = jnp.zeros_like(w_GKN), jnp.zeros(w_GKN.shape[1:], jnp.float32), jnp.int32(-1)
  (d_w_GKN, _, _), _ = lax.scan(block, start, (x_CRK, d_y_CRN, group_C))
  return d_w_GKN
