"""Sinkhorn normalization against a plain loop. Legend: X matrices, c streams [old, new]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.sinkhorn import sinkhorn

ITERATIONS, EPS = 20, 1e-6  # of the release


both = pytest.mark.parametrize("implementation", ["reference", "pallas_triton"])


@functools.partial(jax.jit, static_argnums=(1, 3))
def value_and_pullback(x, iterations, d_m, implementation):
  value, vjp = jax.vjp(lambda x: sinkhorn(x, iterations, EPS, implementation=implementation), x)
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


@both
@pytest.mark.parametrize(
  "shape", [(4, 4), (3, 5, 4, 4), (130, 3, 3), (7, 2, 2), (2, 1, 1), (0, 4, 4)], ids=str
)
def test_value_is_that_of_the_written_out_loop(shape, implementation):
  x = logits(*shape)
  want = plain(np.float64(x), ITERATIONS, np)
  got = jax.jit(lambda x: sinkhorn(x, ITERATIONS, EPS, implementation=implementation))(x)
  np.testing.assert_allclose(got, want, atol=2e-6)


def test_columns_add_up_to_one_and_rows_nearly():
  x = logits(200, 4, 4) / 2
  m = jax.jit(lambda x: sinkhorn(x, ITERATIONS, EPS))(x)
  np.testing.assert_allclose(m.sum(-2), 1, atol=1e-5)
  np.testing.assert_allclose(m.sum(-1), 1, atol=1e-3)


@both
@pytest.mark.parametrize("iterations", [1, 2, ITERATIONS])
@pytest.mark.parametrize("shape", [(6, 4, 4), (3, 30, 2, 2)], ids=str)
def test_gradient_is_that_of_the_written_out_loop(shape, iterations, implementation):
  x, d_m = logits(*shape), jax.random.normal(jax.random.key(1), shape)
  _, got = value_and_pullback(x, iterations, d_m, implementation)
  want = jax.jit(lambda x: jax.vjp(lambda x: plain(x, iterations, jnp), x)[1](d_m)[0])(x)
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@both
def test_far_logits_give_finite_values_and_gradients(implementation):
  x = jnp.array([[[1e4, -1e4], [-1e4, 1e4]], [[200.0, 0.0], [200.0, 0.0]]])
  value, d_x = value_and_pullback(x, ITERATIONS, jnp.ones_like(x), implementation)
  assert np.isfinite(value).all() and np.isfinite(d_x).all()


@pytest.mark.parametrize(
  ("x", "limit"),
  [(logits(3, 8, 8), "8 streams"), (logits(3, 4, 4).astype(jnp.bfloat16), "bfloat16")],
  ids=["streams", "dtype"],
)
def test_what_the_kernel_does_not_take_is_left_to_plain_jax(x, limit):
  with pytest.raises(NotImplementedError, match=limit):
    sinkhorn(x, ITERATIONS, EPS, implementation="pallas_triton")
