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
  rows, length = jax.tree.leaves(queries)[0].shape[:2]
  if length <= chunk:
    return body(0, queries)
  count = -(-length // chunk)

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, count, chunk, *x.shape[2:]), 1, 0)

  def join(x):
    return jnp.moveaxis(x, 0, 1).reshape(rows, count * chunk, *x.shape[3:])[:, :length]

  starts = jnp.arange(count, dtype=jnp.int32) * chunk
  step = jax.checkpoint(lambda piece: body(*piece))
  return jax.tree.map(join, jax.lax.map(step, (starts, jax.tree.map(split, queries))))
