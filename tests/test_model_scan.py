"""Layers that run as a repeated group are the layers that stand alone, and what they choose does
not depend on whether gradients are wanted."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from deepseek_jax.config import ModelConfig, NumericsConfig
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import Model, logits
from deepseek_jax.nn.block import REMAT
from deepseek_jax.types import LayerAux

SMALL = ModelConfig.from_dict(nano.get_config().model.to_dict())
# Two equal groups of the encoder, the decoder's source, two equal groups behind it.
SCANNED = dataclasses.replace(
  SMALL,
  compress_ratios=(2, 2, 2, 2, 1, 1, 1),
  kv_sources=(0, 2, 4),
  index_sources=(0, 2, 4, 5, 6),
  decoder_start=4,
  indexer=dataclasses.replace(SMALL.indexer, pool_source=4),
  engram=dataclasses.replace(SMALL.engram, layers=(), table_rows=()),
  numerics=NumericsConfig(compute_dtype="float32", window_fp8=False),
)
UNROLLED = dataclasses.replace(SCANNED, scan_layers=False, remat="none")
REMAT_OTHERS = sorted(set(REMAT) - {"block"})
TOLERANCE = 1e-5  # of the largest magnitude, docs/design.md section 5
FAST_COMPILE = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def layout():
  """Documents long enough for top-k and the pool to bind, a lone token, and a row of padding."""
  rng = np.random.default_rng(0)
  rows = [
    [Document(rng.integers(0, SCANNED.vocab, n)) for n in lengths]
    for lengths in ((3, 26, 1), (32,), ())
  ]
  return stack_layouts([build_layout(row, slots=32, ratios=(1, 2)) for row in rows])


@pytest.fixture(scope="module")
def variables(layout):
  """Of the unrolled model."""
  init = lambda key: nn.unbox(Model(UNROLLED).init(key, layout))
  rng = np.random.default_rng(1)
  scale = lambda leaf: 0.2 if leaf.ndim > 1 else 0.3
  draw = lambda leaf: np.float32((leaf.ndim == 1) + scale(leaf) * rng.normal(size=leaf.shape))
  return jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))


def stacked(cfg, by_layer):
  """The unrolled tree as the scanned model wants it: repetitions of a layer along a new axis."""
  out = {k: v for k, v in by_layer.items() if not k.startswith("layer_")}
  for group in cfg.scan_plan():
    first, size = group.layers[0].layer, len(group.layers)
    layers = [
      [by_layer[f"layer_{first + repetition * size + n}"] for repetition in range(group.repeat)]
      for n in range(size)
    ]
    if group.repeat == 1:
      out |= {f"layer_{first + n}": layer for n, (layer,) in enumerate(layers)}
    else:
      join = lambda *leaves: np.stack(leaves)
      out[group.name] = {f"layer_{n}": jax.tree.map(join, *same) for n, same in enumerate(layers)}
  return out


def total(cfg, params, balance, layout, tap=None):
  options = {} if tap is None else {"tap": tap}
  model = Model(cfg, indexer_loss="sparse", **options)
  output = model.apply({"params": params, "balance": balance}, layout)
  shape = (*layout.tokens.shape, cfg.vocab)
  cotangent_BTV = jnp.cos(jnp.arange(np.prod(shape))).reshape(shape) * layout.weights[..., None]
  layers = jax.tree.leaves(output.layers, is_leaf=lambda node: isinstance(node, LayerAux))
  kl = sum(layer.indexer_kl.sum() for layer in layers)
  return jnp.sum(logits(output) * cotangent_BTV) + kl, output


def observed(params, balance, layout):
  """The unrolled model's value with its choices and everything else that is a whole number."""
  seen = {}

  def tap(name, value):
    if value.dtype == jnp.int32:
      seen[name] = value
    return value

  value, output = total(UNROLLED, params, balance, layout, tap)
  return value, (output, seen)


@pytest.fixture(scope="module")
def with_gradients(variables, layout):
  run = jax.jit(jax.value_and_grad(observed, has_aux=True), compiler_options=FAST_COMPILE)
  return run(variables["params"], variables["balance"], layout)


def test_the_plan_has_repeated_groups_of_both_halves():
  plan = [(group.name, len(group.layers), group.repeat) for group in SCANNED.scan_plan()]
  assert plan == [("layers_0_3", 2, 2), ("layers_4_4", 1, 1), ("layers_5_6", 1, 2)]


def test_every_remat_policy_has_a_name_that_a_configuration_may_give():
  kinds = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
  assert set(get_args(kinds["remat"])) == set(REMAT)


@pytest.mark.parametrize(
  "remat", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in REMAT_OTHERS)]
)
def test_scanned_layers_equal_unrolled_ones_in_value_and_gradient(
  variables, layout, with_gradients, remat
):
  """The unrolled ones compute nothing again."""
  (value, (output, _)), grads = with_gradients
  cfg = dataclasses.replace(SCANNED, remat=remat)
  run = jax.jit(
    jax.value_and_grad(lambda *a: total(cfg, *a), has_aux=True), compiler_options=FAST_COMPILE
  )
  (got_value, got), got_grads = run(
    stacked(SCANNED, variables["params"]), stacked(SCANNED, variables["balance"]), layout
  )
  assert got_value == pytest.approx(float(value), rel=TOLERANCE)
  pairs = zip(
    jax.tree.leaves_with_path((got.hidden_BTD, got.layers, got_grads)),
    jax.tree.leaves((output.hidden_BTD, stacked(SCANNED, output.layers), stacked(SCANNED, grads))),
    strict=True,
  )
  for (path, ours), theirs in pairs:
    error, largest = np.abs(ours - theirs).max(), np.abs(theirs).max()
    assert error <= TOLERANCE * largest, (jax.tree_util.keystr(path), error, largest)


def test_choices_are_bit_identical_with_and_without_gradients(variables, layout, with_gradients):
  (_, (_, with_them)), _ = with_gradients
  run = jax.jit(observed, compiler_options=FAST_COMPILE)
  _, (_, without) = run(variables["params"], variables["balance"], layout)
  kinds = {name.split(".", 2)[2] for name in without}
  assert kinds >= {"indexer.topk", "indexer.pool", "ffn.router_experts"}
  for name, chosen in without.items():
    np.testing.assert_array_equal(chosen, with_them[name], err_msg=name)
