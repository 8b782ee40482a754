"""A trained model's weights, a layer at a time."""

import jax
import numpy as np
from flax import linen as nn

from deepseek_jax.layout import build_layout
from deepseek_jax.model import Model
from deepseek_jax.sampling.weights import unrolled
from tests.test_model_scan import SCANNED, UNROLLED, stacked


def test_layers_of_repeated_groups_come_apart_in_order():
  layout = build_layout([], slots=8, ratios=(1, 2))
  shapes = jax.eval_shape(
    lambda key: nn.unbox(Model(UNROLLED).init(key, layout)), jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  drawn = jax.tree.map(lambda x: rng.normal(size=x.shape), shapes)
  for name in ("params", "balance"):
    together = stacked(SCANNED, drawn[name])
    assert any(group.startswith("layers_") for group in together)
    jax.tree.map(np.testing.assert_array_equal, unrolled(SCANNED, together), drawn[name])
