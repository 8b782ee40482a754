"""One update of each parameter group is the formula; the state is float32, one per parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.optim.adamw import make_optimizer, update_count
from deepseek_jax.training_config import OptimConfig

CFG = OptimConfig(peak_lr=0.01, final_lr=0.01, warmup_steps=0, weight_decay=0.1, clip_norm=1e9)
PARAMS = {
  "embed": jnp.array([2.0, -2.0]),
  "layer_0": {
    "attn": {"sink": jnp.array([2.0, -2.0]), "wkv": jnp.array([2.0, -2.0])},
    "engram": {"table": jnp.array([2.0, -2.0])},
  },
  "norm": jnp.array([2.0, -2.0]),
}
GRADS = jax.tree.map(lambda w: jnp.array([0.5, 0.0]), PARAMS)


def first_update(cfg=CFG, grads=GRADS):
  optimizer = make_optimizer(cfg, 10)
  return optimizer.update(grads, optimizer.init(PARAMS), PARAMS)


def test_first_update_is_the_sign_of_the_gradient_plus_the_groups_decay():
  updates, _ = first_update()
  plain, decayed = [-0.01, 0.0], [-0.01 - 0.002, 0.002]
  np.testing.assert_allclose(updates["embed"], plain, rtol=1e-5)
  np.testing.assert_allclose(updates["layer_0"]["attn"]["sink"], plain, rtol=1e-5)
  np.testing.assert_allclose(updates["layer_0"]["attn"]["wkv"], decayed, rtol=1e-5)
  np.testing.assert_allclose(updates["norm"], decayed, rtol=1e-5)
  np.testing.assert_allclose(updates["layer_0"]["engram"]["table"], [-0.05, 0.0], rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [0.3, 100.0])
def test_the_global_norm_is_clipped_before_the_moments(clip_norm):
  cfg = OptimConfig(warmup_steps=0, clip_norm=clip_norm)
  _, state = first_update(cfg)
  norm = np.sqrt(5 * 0.25)
  wanted = 0.1 * 0.5 * min(1.0, clip_norm / norm)
  np.testing.assert_allclose(state[1].mu["embed"][0], wanted, rtol=1e-5)


def test_moments_are_float32_and_nested_like_the_parameters():
  _, state = first_update()
  for moment in (state[1].mu, state[1].nu):
    assert jax.tree.structure(moment) == jax.tree.structure(PARAMS)
    assert {x.dtype for x in jax.tree.leaves(moment)} == {jnp.dtype("float32")}


def test_update_count_is_the_argument_of_the_schedule():
  optimizer = make_optimizer(CFG, 10)
  state = optimizer.init(PARAMS)
  assert update_count(state) == 0
  assert update_count(optimizer.update(GRADS, state, PARAMS)[1]) == 1
