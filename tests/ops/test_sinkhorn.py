"""Sinkhorn normalization against a plain loop. Legend: X matrices, c streams [old, new]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.sinkhorn import sinkhorn

ITERATIONS, EPS = 20, 1e-6  # of the release


@functools.partial(jax.jit, static_argnums=1)
def value_and_pullback(x, iterations, d_m):
  value, vjp = jax.vjp(lambda x: sinkhorn(x, iterations, EPS), x)
  return value, vjp(d_m)[0]


def plain(logits_Xcc, iterations, xp):
  """model.md section 2.2, written out; xp is numpy or jax.numpy."""
  power = xp.exp(logits_Xcc - logits_Xcc.max(-1, keepdims=True))
  m = power / power.sum(-1, keepdims=True) + EPS
  m = m / (m.sum(-2, keepdims=True) + EPS)
  for _ in range(iterations - 1):
    m = m / (m.sum(-1, keepdims=True) + EPS)
    m = m / (m.sum(-2, keepdims=True) + EPS)
  return m


def logits(*shape):
  return jax.random.normal(jax.random.key(0), shape) * 2


@pytest.mark.parametrize("shape", [(4, 4), (3, 5, 4, 4), (7, 2, 2), (2, 1, 1)], ids=str)
def test_value_is_that_of_the_written_out_loop(shape):
  x = logits(*shape)
  want = plain(np.float64(x), ITERATIONS, np)
  got = jax.jit(lambda x: sinkhorn(x, ITERATIONS, EPS))(x)
  np.testing.assert_allclose(got, want, atol=2e-6)


def test_columns_add_up_to_one_and_rows_nearly():
  x = logits(200, 4, 4) / 2
  m = jax.jit(lambda x: sinkhorn(x, ITERATIONS, EPS))(x)
  np.testing.assert_allclose(m.sum(-2), 1, atol=1e-5)
  np.testing.assert_allclose(m.sum(-1), 1, atol=1e-3)


@pytest.mark.parametrize("iterations", [1, 2, ITERATIONS])
def test_gradient_is_that_of_the_written_out_loop(iterations):
  x, d_m = logits(6, 4, 4), jax.random.normal(jax.random.key(1), (6, 4, 4))
  _, got = value_and_pullback(x, iterations, d_m)
  want = jax.jit(lambda x: jax.vjp(lambda x: plain(x, iterations, jnp), x)[1](d_m)[0])(x)
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_far_logits_give_finite_values_and_gradients():
  x = jnp.array([[[1e4, -1e4], [-1e4, 1e4]], [[200.0, 0.0], [200.0, 0.0]]])
  value, d_x = value_and_pullback(x, ITERATIONS, jnp.ones_like(x))
  assert np.isfinite(value).all() and np.isfinite(d_x).all()
