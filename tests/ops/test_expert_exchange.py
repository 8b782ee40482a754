"""Moving tokens to experts and back. Legend: X tokens, k per token, E experts, P rows, D width."""

import jax
import numpy as np
import pytest

from deepseek_jax.ops.exchange import buffer_rows
from deepseek_jax.ops.expert_exchange import routes as expert_routes

X, K, E, D = 24, 2, 5, 3
LOADS = {
  "mixed": np.random.default_rng(0).permuted(np.tile(np.arange(E), (X, 1)), axis=1)[:, :K],
  "one expert takes all": np.full((X, K), 3),
  "first and last are empty": 1 + np.arange(X * K).reshape(X, K) % (E - 2),
  "one token": np.array([[4, 0]]),
}
every_load = pytest.mark.parametrize("load", LOADS)
block_sizes = pytest.mark.parametrize("block_rows", [1, 4, 8])


def plan(load, block_rows):
  expert_Xk = LOADS[load].astype(np.int32)
  make = jax.jit(lambda e: expert_routes.plan(e, E, block_rows=block_rows))
  return expert_Xk, make(expert_Xk)


def whole_numbers(*shape, seed=0):
  return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


@every_load
@block_sizes
def test_every_copy_has_a_row_of_its_own_in_its_expert_s_blocks(load, block_rows):
  expert_Xk, routes = plan(load, block_rows)
  rows = np.asarray(routes.row_Xk).ravel()
  assert len(set(rows)) == expert_Xk.size
  ends_E = np.cumsum(routes.group_rows_E)
  np.testing.assert_array_equal(np.searchsorted(ends_E, rows, side="right"), expert_Xk.ravel())
  np.testing.assert_array_equal(np.asarray(routes.group_rows_E) % block_rows, 0)
  load_E = np.bincount(expert_Xk.ravel(), minlength=E)
  np.testing.assert_array_equal(routes.group_rows_E, -(-load_E // block_rows) * block_rows)
  np.testing.assert_array_equal(np.asarray(routes.token_P)[rows], np.arange(expert_Xk.size))
  assert np.sum(np.asarray(routes.token_P) < expert_Xk.size) == expert_Xk.size


@every_load
@block_sizes
def test_rows_hold_their_token_and_padding_holds_zeros(load, block_rows):
  expert_Xk, routes = plan(load, block_rows)
  x_XD = whole_numbers(len(expert_Xk), D)
  rows_PD = np.asarray(expert_routes.to_experts(x_XD, routes))
  np.testing.assert_array_equal(rows_PD[routes.row_Xk], np.repeat(x_XD[:, None], K, 1))
  used = np.zeros(len(rows_PD), bool)
  used[np.asarray(routes.row_Xk).ravel()] = True
  assert not np.any(rows_PD[~used])
  weight_P = expert_routes.weights_to_experts(np.ones(expert_Xk.shape, np.float32), routes)
  np.testing.assert_array_equal(weight_P, used)


@every_load
def test_there_and_back_are_transposes_and_each_other_s_gradient(load):
  expert_Xk, routes = plan(load, 4)
  x_XD = whole_numbers(len(expert_Xk), D)
  y_PD = whole_numbers(len(routes.token_P), D, seed=1)
  there, there_vjp = jax.vjp(lambda x: expert_routes.to_experts(x, routes), x_XD)
  back, back_vjp = jax.vjp(lambda y: expert_routes.from_experts(y, routes), y_PD)
  assert np.sum(there * y_PD) == np.sum(x_XD * back)  # whole numbers: no rounding
  np.testing.assert_array_equal(there_vjp(y_PD)[0], back)
  np.testing.assert_array_equal(back_vjp(x_XD)[0], there)

  weight_Xk = whole_numbers(*expert_Xk.shape)
  rows, vjp = jax.vjp(lambda w: expert_routes.weights_to_experts(w, routes), weight_Xk)
  d_P = whole_numbers(len(rows), seed=2)
  assert np.sum(rows * d_P) == np.sum(weight_Xk * vjp(d_P)[0])


def test_copies_add_up_in_float32():
  _, routes = plan("one token", 1)
  y_PD = np.zeros((len(routes.token_P), 1), np.float32)
  y_PD[np.asarray(routes.row_Xk)[0], 0] = 1.0, 2.0**-9
  out = expert_routes.from_experts(jax.numpy.asarray(y_PD, "bfloat16"), routes)
  assert out.dtype == np.float32 and out[0, 0] == 1 + 2.0**-9


@pytest.mark.parametrize("block_rows", [1, 8, 128])
def test_padded_rows_suffice_for_the_worst_load(block_rows):
  """The worst: every expert but one gets a single token."""
  expert_Xk = np.zeros((X, 1), np.int32)
  expert_Xk[: E - 1, 0] = np.arange(1, E)
  routes = expert_routes.plan(expert_Xk, E, block_rows=block_rows)
  assert routes.group_rows_E.sum() <= buffer_rows(X, E, block_rows)
  assert len(routes.token_P) % block_rows == 0
