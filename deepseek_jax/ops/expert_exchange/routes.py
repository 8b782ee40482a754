"""Moves tokens to their experts' rows and back on one device, without dropping any.

Every expert owns a run of rows that starts at a multiple of `block_rows` and is padded with zero
rows to one, so that a block of rows belongs to one expert. Moving there and moving back are each
other's transpose, and both are gathers.
Legend: X tokens, k experts per token, E experts, P padded rows, D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.exchange import buffer_rows

# Rows that share one expert's matrix in a block; small, since each expert wastes up to one block.
_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = {"cpu": 8, "gpu": 64, "tpu": 8}  # a tensor core's product has 64 rows on Hopper


class Routes(NamedTuple):
  row_Xk: jax.Array  # int32 padded row of each token's copies
  token_P: jax.Array  # int32 flat index x * k + choice of each row, X * k in padding
  group_rows_E: jax.Array  # int32 rows of each expert, a multiple of block_rows


def plan(expert_Xk: jax.Array, experts: int, *, block_rows: int) -> Routes:
  """Lays tokens out by expert. Row counts are data; the number of padded rows is not."""
  flat_Y = expert_Xk.reshape(-1)
  copies = flat_Y.shape[0]
  rows = buffer_rows(copies, experts, block_rows)
  order_Y = jnp.argsort(flat_Y, stable=True)
  load_E = jnp.sum(flat_Y[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
  group_rows_E = -(-load_E // block_rows) * block_rows
  # A token's row: where its expert's run starts, plus how many copies sort before it in the run.
  shift_E = (jnp.cumsum(group_rows_E) - group_rows_E) - (jnp.cumsum(load_E) - load_E)
  sorted_row_Y = jnp.arange(copies, dtype=jnp.int32) + shift_E[flat_Y[order_Y]]
  token_P = jnp.full(rows, copies, jnp.int32).at[sorted_row_Y].set(order_Y.astype(jnp.int32))
  row_Y = jnp.zeros(copies, jnp.int32).at[order_Y].set(sorted_row_Y)
  return Routes(row_Y.reshape(expert_Xk.shape), token_P, group_rows_E)


def block_rows(copies: int, experts: int) -> int:
  """About a quarter of an expert's mean load, a power of two, so that padding stays small."""
  block = _SMALLEST_BLOCK[dispatch.device().platform]
  while block < _LARGEST_BLOCK and block * 8 * experts <= copies:
    block *= 2
  return block


def _gather_or_zero(x, index):
  """x[index], zero where index is one past the end."""
  taken = x[jnp.minimum(index, x.shape[0] - 1)]
  shape = index.shape + (1,) * (taken.ndim - index.ndim)
  return jnp.where((index < x.shape[0]).reshape(shape), taken, 0)


@jax.custom_vjp
def to_experts(x_XD: jax.Array, routes: Routes) -> jax.Array:
  """[X, D] tokens -> [P, D] rows; padding rows are zero."""
  return _gather_or_zero(x_XD, routes.token_P // routes.row_Xk.shape[1])


@jax.custom_vjp
def from_experts(y_PD: jax.Array, routes: Routes) -> jax.Array:
  """[P, D] rows -> [X, D]: the float32 sum of each token's copies."""
  return jnp.sum(y_PD[routes.row_Xk].astype(jnp.float32), axis=1)


@jax.custom_vjp
def weights_to_experts(weight_Xk: jax.Array, routes: Routes) -> jax.Array:
  """[X, k] routing weights -> [P], zero in padding."""
  return _gather_or_zero(weight_Xk.reshape(-1), routes.token_P)


def _like(x):
  return jnp.zeros((0,), x.dtype)  # carries a dtype to the backward pass


to_experts.defvjp(
  lambda x, routes: (to_experts(x, routes), (routes, _like(x))),
  lambda saved, d_PD: (from_experts(d_PD, saved[0]).astype(saved[1].dtype), None),
)
from_experts.defvjp(
  lambda y, routes: (from_experts(y, routes), (routes, _like(y))),
  lambda saved, d_XD: (to_experts(d_XD, saved[0]).astype(saved[1].dtype), None),
)
weights_to_experts.defvjp(
  lambda w, routes: (weights_to_experts(w, routes), routes),
  lambda routes, d_P: (d_P[routes.row_Xk], None),
)
