"""Norms by part add up to the norm of all, and every part of the backbone has its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from configs import tiny
from configs.schema import Settings
from deepseek_jax.model import Model
from deepseek_jax.optim.parts import in_a_byte, norms
from train.batches import empty_row

SETTINGS = Settings.from_dict(tiny.get_config().to_dict())


def test_parts_share_the_global_norm_among_them():
  init = lambda: nn.unbox(Model(SETTINGS.model).init(jax.random.key(0), empty_row(SETTINGS)))
  shapes = jax.eval_shape(init)["params"]
  tree = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, jnp.float32), shapes)
  found = norms(tree)
  assert set(found) == {
    *("attention", "compressor", "embed", "engram", "experts", "head", "hyper_connections"),
    *("indexer", "other", "router", "shared"),
  }
  np.testing.assert_allclose(
    np.sqrt(sum(float(n) ** 2 for n in found.values())), optax.global_norm(tree), rtol=1e-6
  )
  experts = sum(x.size for path, x in jax.tree.leaves_with_path(tree) if "experts" in str(path))
  np.testing.assert_allclose(found["experts"], 0.5 * np.sqrt(experts), rtol=1e-6)


def test_a_norm_of_bytes_is_nearly_that_of_float32_at_any_learning_rate():
  rng = np.random.default_rng(0)
  spread, equal = rng.normal(size=(300, 100)), np.sign(rng.normal(size=(300, 100)))
  for rate in (1e-7, 1e-6, 1.125 * 2.0**-14, 1e-4, 3e-4, 1e-2):
    for numbers in (spread, equal):
      tree = {"embed": jnp.asarray(rate * numbers, jnp.float32)}
      found, want = (float(norms(t)["embed"]) for t in (in_a_byte(tree), tree))
      np.testing.assert_allclose(found, want, rtol=1e-2)


def test_a_norm_of_bytes_says_when_updates_diverge():
  found = lambda *numbers: float(norms(in_a_byte({"embed": jnp.array([numbers])}))["embed"])
  assert 3 < found(1e6) < np.inf
  assert np.isnan(found(1.0, np.nan))
