"""Sinkhorn-balanced momentum is the report's algorithm, and leaves unread rows as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.optim.sinkhorn_momentum import balance, scale_by_balanced_momentum

BETA, GAMMA = 0.95, 0.18


def optimizer(rows=None):
  return scale_by_balanced_momentum(
    lambda _, shape: shape[0] if rows is None else rows, momentum=BETA, rms=GAMMA
  )


def algorithm(m_previous, gradient, rows=None):
  """Line by line as in model.md section 6.2, in float64: (M, gamma sqrt(n) U)."""
  m = BETA * m_previous + (1 - BETA) * gradient
  n = BETA * m + (1 - BETA) * gradient
  rho = np.linalg.norm(n, axis=1)
  u = np.where((rho <= 1e-3 * rho.sum() / (rows or len(rho)))[:, None], 0, n)
  for k in range(1, 12):
    axis = 1 if k % 2 else 0
    u = u / (np.linalg.norm(u, axis=axis, keepdims=True) + 1e-20)
  return m, GAMMA * np.sqrt(n.shape[1]) * u


def test_the_report_s_test_vector():
  gradient = {"embed": jnp.array([[1.0, -1.0], [-1.0, 1.0]])}
  updates, state = optimizer().update(gradient, optimizer().init(gradient))
  np.testing.assert_allclose(state[1].trace["embed"], 0.05 * gradient["embed"], rtol=1e-6)
  np.testing.assert_allclose(updates["embed"], 0.18 * gradient["embed"], rtol=1e-6)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (1, 3)])
def test_several_steps_are_the_algorithm(shape):
  rng = np.random.default_rng(0)
  state, m = optimizer().init({"embed": jnp.zeros(shape)}), np.zeros(shape)
  for step in range(4):
    gradient = rng.standard_normal(shape) * np.logspace(-2, 1, shape[0])[:, None]
    gradient[step % shape[0]] = 0
    m, want = algorithm(m, gradient)
    got, state = optimizer().update({"embed": jnp.asarray(gradient, jnp.float32)}, state)
    np.testing.assert_allclose(got["embed"], want, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state[1].trace["embed"], m, rtol=1e-5, atol=1e-8)


def test_every_row_that_moves_has_the_same_root_mean_square():
  x_mn = np.random.default_rng(1).standard_normal((6, 16)) * np.logspace(-1, 1, 6)[:, None]
  updates, _ = optimizer().update(
    {"embed": jnp.asarray(x_mn)}, optimizer().init({"embed": jnp.asarray(x_mn)})
  )
  np.testing.assert_allclose(np.sqrt(np.mean(np.square(updates["embed"]), 1)), 0.18, rtol=1e-5)


def test_rows_that_no_step_read_stay_bit_for_bit_and_faded_ones_stop_exactly():
  rng = np.random.default_rng(2)
  gradient = rng.standard_normal((5, 8)).astype(np.float32)
  gradient[3] = 0
  state = optimizer().init({"embed": jnp.asarray(gradient)})
  _, state = optimizer().update({"embed": jnp.asarray(gradient)}, state)
  gradient[1] = 0  # read once, then never again: 0.95^n falls below a thousandth of the mean
  moved = []
  update = jax.jit(optimizer().update)
  for _ in range(200):
    updates, state = update({"embed": jnp.asarray(gradient)}, state)
    assert not np.any(updates["embed"][3])
    moved.append(bool(np.any(updates["embed"][1])))
  assert moved[0] and moved == sorted(moved, reverse=True)  # once it stops, it stays
  assert 60 < sum(moved) < 160 and not moved[-1]


def test_the_threshold_is_inclusive_and_taken_once():
  # rho = 2, 0.004, ...: the mean over four rows is 1 and tau times it 1e-3; the last row has it.
  x_mn = jnp.array([[2.0, 0.0], [0.0, 1.999], [0.001, 0.0], [0.0, 0.0]])
  assert float(jnp.sum(jnp.sqrt(jnp.sum(x_mn**2, 1)))) == 4.0
  got = balance(x_mn, 4)
  assert not np.any(got[2:]) and np.all(np.linalg.norm(got[:2], axis=1) > 0.99)


def test_rows_that_only_pad_a_table_do_not_count_in_the_mean():
  x_mn = np.zeros((8, 2), np.float32)
  x_mn[:3] = [[1.0, 0.0], [0.0, 1.0], [6e-4, 0.0]]
  # The mean over four rows is 0.5, so the third row is above a thousandth of it; over three rows
  # it is 0.67, and the row is not.
  assert np.any(balance(jnp.asarray(x_mn), 4)[2])
  assert not np.any(balance(jnp.asarray(x_mn), 3)[2])
  _, want = algorithm(np.zeros((4, 2)), x_mn[:4].astype(float))
  got, _ = optimizer(4).update(
    {"table": jnp.asarray(x_mn)}, optimizer(4).init({"table": jnp.asarray(x_mn)})
  )
  np.testing.assert_allclose(got["table"][:4], want, rtol=1e-5)
  assert not np.any(got["table"][4:])


def test_a_channel_without_gradients_stays_zero_and_the_others_are_balanced():
  x_mn = np.random.default_rng(3).standard_normal((6, 4))
  x_mn[:, 2] = 0
  _, want = algorithm(np.zeros((6, 4)), x_mn)
  gradient = {"embed": jnp.asarray(x_mn, jnp.float32)}
  got, _ = optimizer().update(gradient, optimizer().init(gradient))
  np.testing.assert_allclose(got["embed"], want, rtol=2e-5, atol=1e-6)


def test_without_a_gradient_nothing_moves():
  zeros = {"embed": jnp.zeros((3, 4))}
  updates, _ = optimizer().update(zeros, optimizer().init(zeros))
  np.testing.assert_array_equal(updates["embed"], zeros["embed"])


def test_the_state_is_float32_whatever_the_gradient_is():
  gradient = {"embed": jnp.ones((3, 4), jnp.bfloat16)}
  _, state = optimizer().update(gradient, optimizer().init(gradient))
  assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32")}
