"""Every term is divided by its own count, and padding costs nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.pretrain import loss
from deepseek_jax.training_config import ObjectiveConfig
from deepseek_jax.types import LayerAux, ModelOutput

CFG = ModelConfig(
  compress_ratios=(2, 1, 1), kv_sources=(0, 1), index_sources=(0, 1, 2), decoder_start=1
)
OBJECTIVE = ObjectiveConfig(balance_weight=0.25, indexer_weight=0.5, vocab_chunk_tokens=7)
VOCAB, DIM, EXPERTS = 11, 4, 3


def batch(*rows):
  make = lambda n: Document(np.arange(n, dtype=np.int32) % VOCAB)
  return stack_layouts(
    [build_layout([make(n) for n in row], slots=16, ratios=(1, 2), align=4) for row in rows]
  )


def aux(balance, kl):
  loads = jnp.zeros((*np.shape(balance), EXPERTS))
  return LayerAux(loads, loads, jnp.asarray(balance), jnp.asarray(kl), jnp.ones(np.shape(balance)))


def output(layout):
  keys = jax.random.split(jax.random.key(0))
  return ModelOutput(
    hidden_BTD=jax.random.normal(keys[0], (*layout.targets.shape, DIM)),
    head_VD=jax.random.normal(keys[1], (VOCAB, DIM)),
    layers={
      "layer_0": aux(3.0, 9.0),
      "layers_1_2": {"layer_0": aux([4.0, 5.0], [22.0, 33.0])},
    },
  )


def test_loss_is_the_formula():
  layout = batch((5,), (3, 4))
  out = output(layout)
  scalar, metrics = loss(out, layout, count(layout, CFG), OBJECTIVE, "float32")

  logits = np.float64(out.hidden_BTD) @ np.float64(out.head_VD).T
  nll = np.log(np.exp(logits).sum(-1))
  nll -= np.take_along_axis(logits, layout.targets[..., None], -1)[..., 0]
  nll = (nll * layout.weights).sum() / layout.weights.sum()
  balance = (3 + 4 + 5) / 2
  kl = 9 / (4 + 2 + 3) + 22 / 12 + 33 / 12
  assert metrics["nll"] == pytest.approx(nll, rel=1e-6)
  assert metrics["balance"] == pytest.approx(balance)
  assert metrics["indexer_kl"] == pytest.approx(kl)
  assert metrics["indexer_kl_layer_2"] == pytest.approx(33 / 12)
  assert scalar == pytest.approx(nll + 0.25 * balance + 0.5 * kl, rel=1e-6)


def test_indexer_off_leaves_the_divergence_out():
  layout = batch((5,), (3, 4))
  off = ObjectiveConfig(balance_weight=0.25, indexer="off")
  scalar, metrics = loss(output(layout), layout, count(layout, CFG), off, "float32")
  assert scalar == pytest.approx(metrics["nll"] + 0.25 * metrics["balance"])
  assert not any(name.startswith("indexer") for name in metrics)


def test_tokens_of_weight_zero_have_no_gradient():
  layout = batch((5,), (3, 4))
  out = output(layout)
  denominators = count(layout, CFG)
  of_hidden = lambda h: loss(
    out._replace(hidden_BTD=h), layout, denominators, OBJECTIVE, "float32"
  )[0]
  d_hidden = np.asarray(jax.grad(of_hidden)(out.hidden_BTD))
  np.testing.assert_array_equal(np.any(d_hidden != 0, axis=-1), layout.weights > 0)


def test_padding_alone_has_loss_zero_and_finite_gradients():
  layout = batch((), ())
  nothing = {"layer_0": aux(0.0, 0.0), "layers_1_2": {"layer_0": aux([0.0, 0.0], [0.0, 0.0])}}
  out = output(layout)._replace(layers=nothing)

  def of_output(out):
    return loss(out, layout, count(layout, CFG), OBJECTIVE, "float32")[0]

  scalar, grads = jax.value_and_grad(of_output)(out)
  assert scalar == 0
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
