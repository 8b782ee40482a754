"""Entries against a loop over groups. Legend: B rows, S slots, N cells, m ratio, D width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.config import AttentionConfig, ModelConfig, NumericsConfig
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import surroundings
from deepseek_jax.nn.compressor import Compressor

D, WIDTH, SLOTS = 6, 4, 12
CFG = ModelConfig(
  dim=D,
  attention=AttentionConfig(head_dim=WIDTH),
  numerics=NumericsConfig(compute_dtype="float32"),
  init_std=0.7,
)
ROWS = ((5, 1, 4), (3, 7))  # odd starts, odd lengths, a document without a pair


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_an_entry_is_the_normalized_gated_mean_of_its_tokens(ratio):
  layout = stack_layouts(
    [
      build_layout([Document(np.arange(n)) for n in row], slots=SLOTS, ratios=(ratio,))
      for row in ROWS
    ]
  )
  entries = surroundings(layout).entries[ratio]
  x_BSD = jax.random.normal(jax.random.key(0), (2, SLOTS, D))
  module = Compressor(CFG, ratio)
  variables = nn.unbox(jax.jit(lambda key: module.init(key, x_BSD, entries))(jax.random.key(1)))
  params = variables["params"]
  assert ("wgate" in params) == (ratio > 1)
  latent_BNd = jax.jit(module.apply)(variables, x_BSD, entries)
  count = 0
  for b, cells in enumerate(layout.entry_slots[ratio]):
    for cell, slots in enumerate(cells):
      if slots[0] < 0:
        continue
      x_mD = np.float64(x_BSD[b, slots])
      mean_d = x_mD[0] @ params["wkv"]
      if ratio > 1:
        weight_md = np.exp(x_mD @ params["wgate"])
        mean_d = np.sum(weight_md / weight_md.sum(0) * (x_mD @ params["wkv"]), 0)
      want = mean_d / np.sqrt(np.mean(mean_d**2)) * params["norm"]
      np.testing.assert_allclose(latent_BNd[b, cell], want, rtol=1e-4, atol=1e-5)
      np.testing.assert_array_equal(entries.positions_BN[b, cell], layout.positions[b, slots[0]])
      count += 1
  assert count == sum(n // ratio for row in ROWS for n in row)


def test_tokens_outside_of_every_group_have_no_gradient():
  layout = build_layout([Document(np.arange(5)), Document(np.arange(1))], slots=8, ratios=(2,))
  entries = surroundings(layout).entries[2]
  x_BSD = jax.random.normal(jax.random.key(0), (1, 8, D))
  module = Compressor(CFG, 2)
  variables = nn.unbox(jax.jit(lambda key: module.init(key, x_BSD, entries))(jax.random.key(1)))
  used = entries.exists_BN[..., None]
  total = lambda x: jnp.sum(jnp.where(used, module.apply(variables, x, entries), 0) ** 3)
  d_x = jax.jit(jax.grad(total))(x_BSD)
  np.testing.assert_array_equal(np.any(d_x[0] != 0, -1), [True] * 4 + [False] * 4)
