"""Muon works on each logical matrix alone, makes it orthogonal, and gives it the recipe's size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from deepseek_jax.optim import muon
from deepseek_jax.optim.muon import COEFFICIENTS, newton_schulz, scale_by_muon

IN_OUT = MuonDimensionNumbers(-2, -1)
PER_HEAD = MuonDimensionNumbers(-3, -1)
STREAMS_IN = MuonDimensionNumbers((-1, -2), -3)


def random(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def polar(x_mn):
  u, _, v = np.linalg.svd(x_mn, full_matrices=False)
  return u @ v


def alone(x_mn):
  """One matrix by the formula, in float64."""
  x = x_mn.astype(np.float64)
  x = x.T if x.shape[0] > x.shape[1] else x
  x = x / np.linalg.norm(x)
  for a, b, c in COEFFICIENTS:
    square = x @ x.T
    x = a * x + (b * square + c * square @ square) @ x
  x = x.T if x_mn.shape[0] > x_mn.shape[1] else x
  return 0.18 * np.sqrt(max(x.shape)) * x


def direction(x, axes, dtype="float32"):
  ours = scale_by_muon(lambda _: axes, momentum=0.0, rms=0.18, dtype=dtype)
  gradient = {"w": jnp.asarray(x)}
  return np.array(ours.update(gradient, ours.init(gradient))[0]["w"])


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (24, 96)])
def test_a_matrix_becomes_orthogonal_with_the_recipe_s_root_mean_square(shape):
  got = direction(random(*shape), IN_OUT)
  np.testing.assert_allclose(np.sqrt(np.mean(got**2)), 0.18, rtol=1e-3)
  singular = np.linalg.svd(got, compute_uv=False)
  np.testing.assert_allclose(singular, 0.18 * np.sqrt(max(shape)), rtol=2e-3)
  np.testing.assert_allclose(got, 0.18 * np.sqrt(max(shape)) * polar(random(*shape)), atol=1e-3)


@pytest.mark.parametrize(
  ("shape", "axes", "matrices"),
  [
    ((12, 8), IN_OUT, [(slice(None), slice(None))]),
    ((3, 12, 8), IN_OUT, [(i,) for i in range(3)]),  # repeated layers, groups or experts
    ((2, 3, 8, 12), IN_OUT, [(i, j) for i in range(2) for j in range(3)]),
    ((16, 4, 6), PER_HEAD, [(slice(None), i) for i in range(4)]),
    ((2, 16, 4, 6), PER_HEAD, [(i, slice(None), j) for i in range(2) for j in range(4)]),
  ],
)
def test_every_logical_matrix_is_treated_as_if_it_were_alone(shape, axes, matrices):
  x = random(*shape) * 1e-3
  x[matrices[-1]] *= 50  # a norm over more than one matrix would show
  got = direction(x, axes)
  for at in matrices:
    np.testing.assert_allclose(got[at], alone(x[at]), atol=2e-5)


@pytest.mark.parametrize("most", [1, 2 * 96, 2**27])
def test_parameters_with_equal_matrices_do_not_mix_however_many_go_together(most, monkeypatch):
  monkeypatch.setattr(muon, "STACKED", most)
  params = {f"layer_{n}": random(*((8, 12), (12, 8))[n % 2], seed=n) * 10.0**n for n in range(5)}
  params["stacked"] = random(2, 8, 12, seed=9)
  ours = scale_by_muon(lambda _: IN_OUT, momentum=0.0, rms=0.18, dtype="float32")
  got, _ = ours.update(params, ours.init(params))
  for n in range(5):
    np.testing.assert_allclose(got[f"layer_{n}"], alone(params[f"layer_{n}"]), atol=2e-5)
  for layer in range(2):
    np.testing.assert_allclose(got["stacked"][layer], alone(params["stacked"][layer]), atol=2e-5)


def test_columns_that_are_two_axes_are_one_matrix():
  x = random(2, 6, 4, 8)
  got = direction(x, STREAMS_IN)
  for layer in range(2):
    np.testing.assert_allclose(got[layer].reshape(6, 32), alone(x[layer].reshape(6, 32)), atol=2e-5)


@pytest.mark.parametrize(("shape", "axes"), [((3, 12, 8), IN_OUT), ((16, 4, 6), PER_HEAD)])
def test_the_first_update_is_that_of_optax(shape, axes):
  params = {"w": jnp.asarray(random(*shape))}
  library = optax.contrib.scale_by_muon(COEFFICIENTS, 10, weight_dimension_numbers={"w": axes})
  want, _ = library.update(params, library.init(params))
  ours = scale_by_muon(lambda _: axes, momentum=0.95, rms=0.18, dtype="float32")
  got, _ = ours.update(params, ours.init(params))
  long = 12 if axes is IN_OUT else 16
  np.testing.assert_allclose(got["w"], 0.18 * np.sqrt(long) * want["w"], atol=2e-5)


def test_the_direction_looks_ahead_along_the_momentum():
  first, second = random(8, 12), random(8, 12, seed=1)
  ours = scale_by_muon(lambda _: IN_OUT, momentum=0.95, rms=0.18, dtype="float32")
  state = ours.init({"w": jnp.asarray(first)})
  _, state = ours.update({"w": jnp.asarray(first)}, state)
  got, state = ours.update({"w": jnp.asarray(second)}, state)
  momentum = 0.95 * first + second
  np.testing.assert_allclose(state[0].trace["w"], momentum, rtol=1e-5)
  np.testing.assert_allclose(got["w"], alone(0.95 * momentum + second), atol=2e-5)


def test_matrices_without_a_gradient_stay_and_tiny_gradients_count_fully():
  x = random(2, 8, 12) * 1e-12
  x[0] = 0
  got = direction(x, IN_OUT)
  assert not np.any(got[0])
  np.testing.assert_allclose(got[1], alone(x[1]), atol=2e-5)


@pytest.mark.parametrize("kind", ["square", "wide", "steep", "low rank"])
def test_bfloat16_products_cost_less_than_two_percent_of_an_update(kind):
  x = {"square": random(128, 128), "wide": random(24, 1024)}.get(kind)
  if kind == "steep":  # singular values over four orders of magnitude
    u, _, v = np.linalg.svd(random(128, 256), full_matrices=False)
    x = (u * np.logspace(0, -4, 128, dtype=np.float32)) @ v
  if kind == "low rank":
    x = random(128, 8) @ random(8, 256) + 1e-3 * random(128, 256)
  want = np.array(newton_schulz(jnp.asarray(x)))
  got = np.array(newton_schulz(jnp.asarray(x), "bfloat16"))
  assert 0 < np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


def test_the_momentum_is_float32_whatever_the_gradient_is():
  gradient = {"w": jnp.ones((3, 4), jnp.bfloat16)}
  ours = scale_by_muon(lambda _: IN_OUT, momentum=0.95, rms=0.18, dtype="float32")
  updates, state = ours.update(gradient, ours.init(gradient))
  assert {x.dtype for x in jax.tree.leaves((updates, state))} == {jnp.dtype("float32")}
