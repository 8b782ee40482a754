"""What a model tells about its condition, and that telling changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import LogConfig, Settings
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.health import health_metrics
from train.programs import training_loss

SETTINGS = Settings.from_dict(nano.get_config().to_dict())
MODEL = SETTINGS.model


def batch():
  rng = np.random.default_rng(0)
  hashing = NgramHash(MODEL.engram, np.arange(MODEL.vocab, dtype=np.int32))
  row = lambda length: build_layout(
    [Document(rng.integers(0, MODEL.vocab, length).astype(np.int32))],
    slots=SETTINGS.data.slots,
    ratios=MODEL.ratios,
    hashing=hashing,
  )
  return stack_layouts([row(SETTINGS.data.slots), row(SETTINGS.data.slots // 2)])


def taught(observed_queries):
  """Loss, metrics, health and gradients of one batch at random weights."""
  log = dataclasses.replace(SETTINGS.log, observed_queries=observed_queries)
  loss_fn = training_loss(dataclasses.replace(SETTINGS, log=log))
  layout = batch()
  variables = nn.unbox(jax.jit(Model(MODEL).init)(jax.random.key(0), layout))
  run = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
  (loss, (_, _, health)), gradients = run(
    variables["params"], variables["balance"], layout, count(layout, MODEL)
  )
  return loss, health, gradients


@pytest.fixture(scope="module")
def watched():
  return taught(LogConfig().observed_queries)


@pytest.mark.slow
def test_watching_changes_neither_loss_nor_gradients(watched):
  loss, health, gradients = taught(0)
  assert health is None
  np.testing.assert_allclose(watched[0], loss, rtol=1e-6)
  for got, want in zip(jax.tree.leaves(watched[2]), jax.tree.leaves(gradients), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-6 * max(1e-6, np.abs(want).max()))


def test_every_layer_with_entries_tells_how_well_it_is_served(watched):
  metrics = health_metrics(watched[1])
  served = [spec.layer for spec in MODEL.schedule() if spec.ratio]
  assert [f"recall_layer_{layer}" in metrics for layer in served] == [True] * len(served)
  assert all(0 < metrics[f"recall_layer_{layer}"] <= 1 + 1e-6 for layer in served)
  assert metrics["pool_recall"] <= 1 + 1e-6
  assert 0 < metrics["sink_mass"] + metrics["window_mass"] < 1
  assert metrics["hc_error"] < 1e-3  # Sinkhorn's rows and columns add up to 1
  assert 0 <= metrics["clamp_hits"] < 0.5 and 0 < metrics["engram_gate"] < 1


def test_means_are_over_all_layers_and_the_largest_of_the_largest():
  pair = lambda total, number: jnp.array([total, number], jnp.float32)
  stacked = jnp.stack([pair(3.0, 1.0), pair(1.0, 1.0)])
  tree = {
    "layer_0": {"attn": {"recall": pair(1.0, 2.0), "largest_logit": pair(8.0, 2.0)}},
    "layers_1_2": {"layer_0": {"attn": {"recall": stacked}}},
    "layer_3": {"attn": {"recall": pair(0.0, 0.0), "largest_logit": pair(5.0, 1.0)}},
  }
  assert {name: float(value) for name, value in health_metrics(tree).items()} == {
    "recall_layer_0": 0.5,
    "recall_layer_1": 3.0,
    "recall_layer_2": 1.0,
    "recall_layer_3": 0.0,
    "recall": 1.25,
    "largest_logit": 5.0,
  }
