"""Routed experts against a loop over all experts, and what the whole MoE reports.

Legend: B rows, Q slots, X tokens, D width, E experts, k experts per token.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.checkpoint import released_formats
from deepseek_jax.config import ModelConfig, MoeConfig, NumericsConfig
from deepseek_jax.nn.moe import Moe, RoutedExperts
from deepseek_jax.types import Slots

X, E, K, D = 24, 5, 2, 8
CFG = ModelConfig(
  dim=D,
  moe=MoeConfig(experts=E, experts_per_token=K, hidden=6, limit=1.0),
  numerics=NumericsConfig(compute_dtype="float32"),
  init_std=0.5,
)
LOADS = {
  "mixed": np.random.default_rng(0).permuted(np.tile(np.arange(E), (X, 1)), axis=1)[:, :K],
  "one expert takes all": np.tile([3, 3], (X, 1)),
  "first and last are empty": 1 + np.arange(X * K).reshape(X, K) % (E - 2),
}


def random(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


@pytest.fixture(scope="module")
def experts():
  """Module, parameters, and value with gradients of any loss of its output, compiled once."""
  module = RoutedExperts(CFG)
  expert_Xk = jnp.asarray(LOADS["mixed"], jnp.int32)
  init = jax.jit(
    lambda key: nn.unbox(module.init(key, *one_row(random(0, X, D), *2 * [expert_Xk])))
  )
  return jax.jit(with_gradients(apply_to_one_row(module))), init(jax.random.key(0))


def one_row(*arrays):
  return tuple(x_X[None] for x_X in arrays)


def apply_to_one_row(module):
  return lambda variables, *arrays: module.apply(variables, *one_row(*arrays))[0][0]


def with_gradients(apply):
  def run(variables, x_XD, expert_Xk, weight_Xk, d_XD):
    out, vjp = jax.vjp(lambda v, x, w: apply(v, x, expert_Xk, w), variables, x_XD, weight_Xk)
    return out, *vjp(d_XD)

  return run


def dense(variables, x_XD, expert_Xk, weight_Xk):
  """model.md section 2.7 with every expert run on every token."""
  params, out_XD = variables["params"], 0.0
  for e in range(E):
    gate = jnp.minimum(x_XD @ params["w1"][e], CFG.moe.limit)
    up = jnp.clip(x_XD @ params["w3"][e], -CFG.moe.limit, CFG.moe.limit)
    weight_X1 = jnp.sum(jnp.where(expert_Xk == e, weight_Xk, 0), axis=-1, keepdims=True)
    out_XD += (jax.nn.silu(gate) * up * weight_X1) @ params["w2"][e]
  return out_XD


@pytest.mark.parametrize("load", LOADS)
def test_routed_experts_equal_a_loop_over_all_of_them_in_value_and_gradient(load, experts):
  run, variables = experts
  expert_Xk = jnp.asarray(LOADS[load], jnp.int32)
  arrays = (random(1, X, D), expert_Xk, random(2, X, K), random(3, X, D))
  got, want = run(variables, *arrays), jax.jit(with_gradients(dense))(variables, *arrays)
  clipped = np.abs(arrays[0] @ variables["params"]["w3"][3]) > CFG.moe.limit
  assert 0.1 < clipped.mean() < 0.9, "both sides of the clamp occur"
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max())


B, Q = 2, 6


@pytest.fixture(scope="module")
def moe():
  module = Moe(CFG)
  slots = Slots(None, jnp.zeros((B, Q), bool), jnp.ones((B, Q), bool), None, None, None, None)
  init = jax.jit(lambda key: nn.unbox(module.init(key, jnp.zeros((B, Q, D)), slots)))

  @jax.jit
  def run(variables, x_BQD, is_vision_BQ, counts_BQ):
    return module.apply(
      variables, x_BQD, slots._replace(is_vision_BQ=is_vision_BQ, counts_BQ=counts_BQ)
    )

  return run, init(jax.random.key(0))


def with_bias(variables, **biases):
  return {"params": variables["params"], "balance": variables["balance"] | biases}


IS_VISION_BQ = np.array(
  [[False, True, True, False, False, False], [True] * 2 + [False] * 2 + [True] * 2]
)
COUNTS_BQ = np.array([[True] * 6, [True] * 4 + [False] * 2])


def test_the_vision_bias_moves_image_slots_alone_and_the_text_bias_the_others(moe):
  run, variables = moe
  x_BQD, push_E = random(1, B, Q, D), jnp.zeros(E).at[4].set(50.0)
  plain, *_ = run(variables, x_BQD, IS_VISION_BQ, COUNTS_BQ)
  pushed = lambda **biases: run(with_bias(variables, **biases), x_BQD, IS_VISION_BQ, COUNTS_BQ)
  vision, text = pushed(bias_vl=push_E), pushed(bias=push_E)
  np.testing.assert_array_equal(vision[0][~IS_VISION_BQ], plain[~IS_VISION_BQ])
  np.testing.assert_array_equal(text[0][IS_VISION_BQ], plain[IS_VISION_BQ])
  assert vision[2][4] == np.sum(IS_VISION_BQ & COUNTS_BQ)
  assert text[1][4] == np.sum(~IS_VISION_BQ & COUNTS_BQ)
  assert np.any(vision[0] != plain) and np.any(text[0] != plain)


def test_loads_count_text_and_vision_slots_apart_and_leave_padding_out(moe):
  run, variables = moe
  _, load_text_E, load_vision_E, *_ = run(variables, random(1, B, Q, D), IS_VISION_BQ, COUNTS_BQ)
  assert load_text_E.sum() == K * np.sum(~IS_VISION_BQ & COUNTS_BQ)
  assert load_vision_E.sum() == K * np.sum(IS_VISION_BQ & COUNTS_BQ)


def test_no_token_is_dropped_when_all_go_to_one_expert(moe):
  run, variables = moe
  everything = np.ones((B, Q), bool)
  x_BQD, push_E = random(1, B, Q, D), jnp.array([0, 60.0, 0, 50.0, 0])
  out_BQD, load_E, *_ = run(with_bias(variables, bias=push_E), x_BQD, ~everything, everything)
  np.testing.assert_array_equal(load_E, [0, B * Q, 0, B * Q, 0])
  for b, q in ((0, 0), (1, Q - 1)):  # the other rows have no part in a token's output
    alone = jnp.zeros((B, Q, D)).at[b, q].set(x_BQD[b, q])
    single, *_ = run(with_bias(variables, bias=push_E), alone, ~everything, everything)
    np.testing.assert_allclose(single[b, q], out_BQD[b, q], rtol=1e-5, atol=1e-6)


def test_the_bias_has_no_gradient_and_the_gate_one_through_the_weights(moe):
  run, variables = moe
  x_BQD, nothing = random(1, B, Q, D), np.zeros((B, Q), bool)
  total = lambda v: jnp.sum(run(v, x_BQD, nothing, ~nothing)[0] ** 2)
  grads = jax.grad(total)(variables)
  assert not np.any(grads["balance"]["bias"]) and not np.any(grads["balance"]["bias_vl"])
  assert np.any(grads["params"]["gate"])


def test_products_see_activations_in_fp8_where_the_stage_says_so():
  sizes = dict(dim=32, moe=dataclasses.replace(CFG.moe, hidden=32))
  rounding = dataclasses.replace(CFG.numerics, activations_fp8=True)
  expert_Xk, x_XD, weight_Xk = (
    jnp.asarray(LOADS["mixed"], jnp.int32),
    random(1, X, 32),
    random(2, X, K),
  )
  plain, rounded = (
    RoutedExperts(dataclasses.replace(CFG, numerics=n, **sizes)) for n in (CFG.numerics, rounding)
  )
  arrays = one_row(x_XD, expert_Xk, weight_Xk)
  variables = nn.unbox(jax.jit(plain.init)(jax.random.key(0), *arrays))
  exact, _ = jax.jit(plain.apply)(variables, *arrays)
  coarse, _ = jax.jit(rounded.apply)(variables, *arrays)
  error = np.linalg.norm(coarse - exact) / np.linalg.norm(exact)
  assert 1e-3 < error < 0.1


def test_fp4_experts_compute_like_ones_that_the_exporter_has_stored():
  """In value; and in gradient, which passes through the rounding as if there were none."""
  cfg = dataclasses.replace(CFG, dim=32, moe=dataclasses.replace(CFG.moe, hidden=32))
  fp4 = dataclasses.replace(cfg, numerics=dataclasses.replace(cfg.numerics, experts_fp4=True))
  arrays = (random(1, X, 32), jnp.asarray(LOADS["mixed"], jnp.int32), random(2, X, K))
  variables = nn.unbox(RoutedExperts(cfg).init(jax.random.key(0), *one_row(*arrays)))
  stored = lambda w: np.stack(
    [released_formats.decode(*released_formats.encode(w_IO.T, "fp4")).T for w_IO in np.asarray(w)]
  )
  before = jax.tree.map(stored, variables)
  run = lambda cfg: jax.jit(with_gradients(apply_to_one_row(RoutedExperts(cfg))))
  of_fp4 = run(fp4)(variables, *arrays, random(3, X, 32))
  of_stored = run(cfg)(before, *arrays, random(3, X, 32))
  for got, want in zip(*map(jax.tree.leaves, (of_fp4, of_stored)), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
  for was, rounded in zip(*map(jax.tree.leaves, (variables, before)), strict=True):
    assert np.abs(was - rounded).max() > 0.05 * np.abs(was).max()
