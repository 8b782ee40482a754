"""Runs a function over the query axis a chunk at a time, so that memory grows linearly with it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def over_queries(body: Callable, queries, chunk: int):
  """Calls body(start, piece) for pieces of `chunk` queries and joins the results.

  Args:
    body: start (int32 scalar or 0) and a tree like `queries` -> a tree of arrays [B, chunk, ...].
    queries: tree of arrays [B, Q, ...].
    chunk: queries at a time; the last piece is filled up with zeros, and its results dropped.

  Returns: tree of arrays [B, Q, ...]. The backward pass computes a piece again.
  """
  length = jax.tree.leaves(queries)[0].shape[1]
  if length <= chunk:
    return body(0, queries)
  starts = jnp.arange(-(-length // chunk), dtype=jnp.int32) * chunk
  step = jax.checkpoint(lambda piece: body(*piece))
  pieces = jax.tree.map(lambda x: split(x, chunk), queries)
  return jax.tree.map(lambda x: join(x, length), jax.lax.map(step, (starts, pieces)))


def split(x_BQ: jax.Array, chunk: int, fill: int = 0) -> jax.Array:
  """[B, Q, ...] -> [n, B, chunk, ...]; the last piece is filled up with `fill`."""
  rows, length = x_BQ.shape[:2]
  count = -(-length // chunk)
  missing = [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x_BQ.ndim - 2)
  x_BQ = jnp.pad(x_BQ, missing, constant_values=fill)
  return jnp.moveaxis(x_BQ.reshape(rows, count, chunk, *x_BQ.shape[2:]), 1, 0)


def join(x_nBC: jax.Array, length: int) -> jax.Array:
  """The inverse of `split`, for Q = length."""
  x_BnC = jnp.moveaxis(x_nBC, 0, 1)
  return x_BnC.reshape(x_BnC.shape[0], -1, *x_BnC.shape[3:])[:, :length]
