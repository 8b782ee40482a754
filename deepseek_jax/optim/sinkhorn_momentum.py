"""Momentum whose rows and columns are balanced: embeddings and Engram tables.

Legend: m rows, n columns.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Source: model.md section 6.2.
PAIRS = 5  # of a row and a column step; one more row step ends them, so K = 11
THRESHOLD = 1e-3  # tau
EPS = 1e-20  # added to norms

CountedRows = Callable[[tuple[Any, ...], tuple[int, ...]], int]


def scale_by_balanced_momentum(
  counted_rows: CountedRows, *, momentum: float, rms: float
) -> optax.GradientTransformation:
  """The direction of Sinkhorn-balanced momentum; the learning rate and its sign come after it.

  M <- momentum M + (1 - momentum) G;  N = momentum M + (1 - momentum) G
  update = rms sqrt(n) balance(N)

  Its state is M, float32, named like the parameters. A row that no step has read has M = 0 and an
  update of exactly 0. One that this step did not read still moves by its momentum, as the report's
  algorithm has it, until |N_i| has fallen to 1e-3 of the mean over all rows; from there on its
  update is exactly 0.

  Args:
    counted_rows: path and shape of a parameter -> rows that exist; the rows behind them are zeros.
    momentum: of Nesterov's look-ahead.
    rms: of every row of an update that is not 0.
  """

  def balanced(updates: optax.Updates, params: Any = None) -> optax.Updates:
    del params
    return jax.tree.map_with_path(
      lambda path, x_mn: (
        rms * math.sqrt(x_mn.shape[1]) * balance(x_mn, counted_rows(path, x_mn.shape))
      ),
      updates,
    )

  return optax.chain(
    optax.scale(1 - momentum),
    optax.trace(momentum, nesterov=True, accumulator_dtype=jnp.float32),
    optax.stateless(balanced),
  )


def balance(x_mn: jax.Array, rows: int) -> jax.Array:
  """Rows and columns divided by their norms in turn, eleven times; rows begin and end.

  rho_i = |x_i|;  rows with rho_i <= tau sum(rho) / rows become 0
  x_i <- x_i / (|x_i| + eps)   and   x_j <- x_j / (|x_j| + eps)   in turn

  The matrix is only read: a step changes one factor for each row, or for each column.

  Args:
    x_mn: float32.
    rows: how many of m count in the mean; the others are 0.

  Returns: float32 [m, n] with rows of norm 1, or exactly 0.
  """
  norm_m = _norm(x_mn, axis=1)
  keep_m = norm_m > THRESHOLD * jnp.sum(norm_m) / rows

  def row_step(of_m: jax.Array, of_n: jax.Array) -> jax.Array:
    return _divided(of_m, _norm(x_mn * of_n, axis=1))

  def pair(_: Any, factors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    of_m, of_n = factors
    of_m = row_step(of_m, of_n)
    return of_m, _divided(of_n, _norm(x_mn * of_m[:, None], axis=0))

  start = keep_m.astype(jnp.float32), jnp.ones(x_mn.shape[1], jnp.float32)
  of_m, of_n = jax.lax.fori_loop(0, PAIRS, pair, start)
  return x_mn * row_step(of_m, of_n)[:, None] * of_n


def _divided(factor: jax.Array, norm: jax.Array) -> jax.Array:
  """The factor of rows or columns that have so far been scaled to factor * norm."""
  # A row or column of zeros stays 0; its factor would grow without bound.
  return jnp.where(norm > 0, factor / (factor * norm + EPS), 0.0)


def _norm(x_mn: jax.Array, axis: int) -> jax.Array:
  return jnp.sqrt(jnp.sum(jnp.square(x_mn), axis=axis))
