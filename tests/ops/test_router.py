"""Expert choice and the balance loss. Legend: B rows, Q slots, X tokens, E experts, k per token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.router import balance_loss, expert_load, route, sqrt_softplus

X, E, K, SCALE = 40, 8, 3, 1.5


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_scores_are_the_root_of_softplus_with_its_slope():
  x = np.linspace(-60, 60, 241, dtype=np.float32)
  value, slope = jax.vmap(jax.value_and_grad(sqrt_softplus))(x)
  root = np.sqrt(np.logaddexp(0, np.float64(x)))
  np.testing.assert_allclose(value, root, rtol=1e-5)
  np.testing.assert_allclose(slope, 0.5 / root / (1 + np.exp(-np.float64(x))), rtol=1e-5)


@pytest.mark.parametrize("x", [-1e30, -200.0, -15.0, 0.0, 200.0, 1e30])
def test_slope_of_the_score_is_finite_everywhere(x):
  value, slope = jax.value_and_grad(sqrt_softplus)(x)
  assert np.isfinite(value) and np.isfinite(slope) and value >= 0 and slope >= 0


def test_equal_scores_go_to_the_lowest_experts():
  expert_Xk, _ = route(jnp.ones((5, E)), jnp.zeros(E), experts_per_token=K, scale=SCALE)
  np.testing.assert_array_equal(expert_Xk, [range(K)] * 5)
  scores_XE = jnp.array([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0, 0.0, 2.0]])
  expert_Xk, _ = route(scores_XE, jnp.zeros(E), experts_per_token=4, scale=SCALE)
  np.testing.assert_array_equal(expert_Xk, [[1, 4, 2, 3]])


def test_bias_moves_the_choice_and_not_the_weights():
  scores_XE = sqrt_softplus(random(X, E))
  bias_E = jnp.zeros(E).at[6].set(10.0)
  expert_Xk, weight_Xk = route(scores_XE, bias_E, experts_per_token=K, scale=SCALE)
  assert np.all(expert_Xk[:, 0] == 6)
  chosen_Xk = np.take_along_axis(np.float64(scores_XE), np.asarray(expert_Xk), -1)
  want = chosen_Xk / chosen_Xk.sum(-1, keepdims=True) * SCALE
  np.testing.assert_allclose(weight_Xk, want, rtol=1e-6)


def test_weights_have_the_gradient_of_their_normalized_scores_and_the_bias_none():
  scores_XE, d_Xk = np.asarray(sqrt_softplus(random(X, E))), random(X, K, seed=1)

  def total(scores_XE, bias_E):
    _, weight_Xk = route(scores_XE, bias_E, experts_per_token=K, scale=SCALE)
    return jnp.sum(weight_Xk * d_Xk)

  d_scores, d_bias = jax.grad(total, (0, 1))(scores_XE, jnp.zeros(E))
  expert_Xk, _ = route(scores_XE, jnp.zeros(E), experts_per_token=K, scale=SCALE)
  chosen_Xk = np.take_along_axis(scores_XE, np.asarray(expert_Xk), -1).astype(np.float64)
  sum_X1 = chosen_Xk.sum(-1, keepdims=True)
  along_X1 = np.sum(d_Xk * chosen_Xk, -1, keepdims=True) / sum_X1
  want_XE = np.zeros((X, E))
  np.put_along_axis(want_XE, np.asarray(expert_Xk), SCALE * (d_Xk - along_X1) / sum_X1, -1)
  np.testing.assert_allclose(d_scores, want_XE, atol=1e-5)
  assert not np.any(d_bias)


@pytest.mark.parametrize("logit", [-200.0, -80.0, 80.0])
def test_far_logits_give_finite_weights_and_gradients(logit):
  def total(logits_XE):
    scores_XE = sqrt_softplus(logits_XE)
    return jnp.sum(route(scores_XE, jnp.zeros(E), experts_per_token=K, scale=SCALE)[1])

  value, d_logits = jax.value_and_grad(total)(jnp.full((2, E), logit))
  assert np.isfinite(value) and np.isfinite(d_logits).all()


def test_load_counts_the_slots_that_count():
  expert_BQk = np.array([[[0, 2], [2, 1], [2, 0]], [[3, 1], [3, 2], [0, 1]]], np.int32)
  counts_BQ = np.array([[True, True, False], [False, True, False]])
  load_BE = expert_load(expert_BQk, counts_BQ, 4)
  np.testing.assert_array_equal(load_BE, [[1, 1, 2, 0], [0, 0, 1, 1]])
  assert load_BE.dtype == jnp.float32


def balance(scores_BQE, expert_BQk, counts_BQ):
  return balance_loss(scores_BQE, expert_load(expert_BQk, counts_BQ, E), counts_BQ)


def test_balance_loss_is_the_sum_over_rows_of_load_times_mean_score():
  scores_BQE = np.asarray(sqrt_softplus(random(3, 6, E)))
  expert_BQk = np.argsort(-scores_BQE, -1)[..., :2].astype(np.int32)
  counts_BQ = np.arange(6) < np.array([[6], [4], [0]])  # the last row is padding
  want = 0.0
  for row, length in ((0, 6), (1, 4)):
    share_QE = np.float64(scores_BQE[row, :length])
    share_QE /= share_QE.sum(-1, keepdims=True)
    load_E = np.bincount(expert_BQk[row, :length].ravel(), minlength=E)
    want += np.sum(E * load_E / (2 * length) * share_QE.mean(0))
  assert balance(scores_BQE, expert_BQk, counts_BQ) == pytest.approx(want, rel=1e-5)


def test_balance_loss_is_one_for_even_loads_and_has_no_gradient_in_padding():
  scores_BQE = np.ones((1, E, E), np.float32)
  expert_BQk = np.arange(E, dtype=np.int32)[None, :, None]
  everything = np.ones((1, E), bool)
  assert balance(scores_BQE, expert_BQk, everything) == pytest.approx(1.0)

  counts_BQ = np.arange(E) < np.array([[5]])
  scores_BQE = np.asarray(sqrt_softplus(random(1, E, E)))
  d_scores = jax.grad(balance)(scores_BQE, expert_BQk, counts_BQ)
  np.testing.assert_array_equal(np.any(d_scores != 0, axis=-1), counts_BQ)
