"""Factors of low rank: what they add to which weights, and that nothing but they trains."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax.model import Model
from deepseek_jax.optim import frozen, low_rank, partition
from deepseek_jax.optim.optimizer import make_optimizer
from deepseek_jax.optim.schedule import Span
from deepseek_jax.sharding import make_mesh, state_shardings
from deepseek_jax.training_config import LowRankConfig, MeshConfig
from train.batches import empty_row

RANK, ALPHA = 3, 6.0
CFG = LowRankConfig(rank=RANK, alpha=ALPHA)
SETTINGS = Settings.from_dict(nano.get_config().to_dict())


@pytest.fixture(scope="module")
def boxed():
  """Shapes of a model with a repetition of two layers, in Linen's boxes."""
  # Layers 3 and 4 of the release's kind: a group that begins with `reindex`, twice.
  model = dataclasses.replace(
    SETTINGS.model,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    index_sources=(1, 3, 4, 5),
    scan_layers=True,
  )
  settings = dataclasses.replace(SETTINGS, model=model)
  return jax.eval_shape(Model(model).init, jax.random.key(0), empty_row(settings))["params"]


@pytest.fixture(scope="module")
def params(boxed):
  random = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.float32(random.normal(size=x.shape)), nn.unbox(boxed))


def changed(params):
  """With a B that is not 0."""
  random = np.random.default_rng(1)
  draw = lambda f: f._replace(b=jnp.float32(random.normal(size=f.b.shape)))
  found = low_rank.with_factors(params, CFG, jax.random.key(1))
  of_all = jax.tree.map(draw, found["low_rank"], is_leaf=lambda x: isinstance(x, low_rank.Factors))
  return found | {"low_rank": of_all}


def leaves(tree):
  return {partition.name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def test_every_matrix_of_the_parts_has_factors_of_its_own(params):
  assert any("layers_" in name for name in leaves(params)), "layers must be stacked"
  found = leaves(low_rank.with_factors(params, CFG, jax.random.key(1))["low_rank"])
  roles = lambda names: {partition.role_of(name) for name in names}
  assert roles(found) == {f"{key}/{f}" for key in partition.ADAPTABLE for f in "ab"}
  of_matrices = {n for n in leaves(params) if partition.role_of(n) in partition.ADAPTABLE}
  assert set(found) == {f"{name}/{f}" for name in of_matrices for f in "ab"}
  only = dataclasses.replace(CFG, parts=("experts",))
  found = leaves(low_rank.with_factors(params, only, jax.random.key(1))["low_rank"])
  assert roles(found) == {f"moe/experts/w{n}/{f}" for n in (1, 2, 3) for f in "ab"}


def test_the_change_is_the_product_of_the_factors_matrix_by_matrix(params):
  given = changed(params)
  before, after = leaves(params), leaves(low_rank.merged(given, CFG))
  factors = leaves(given["low_rank"])
  assert set(after) == set(before)
  for name, w in before.items():
    if f"{name}/a" not in factors:
      assert np.array_equal(after[name], w), name
      continue
    a, b = (np.float64(factors[f"{name}/{f}"]) for f in "ab")
    w, change = np.float64(w), np.zeros(w.shape)
    lead = a.ndim - 2
    for index in np.ndindex(a.shape[:lead]):  # layers of a repetition, experts, output groups
      product = a[index] @ b[index].reshape(RANK, -1)
      change[index] = product.reshape(w.shape[lead:])
    assert math.prod(a.shape[:lead]) == w.size / (a.shape[-2] * math.prod(b.shape[lead + 1 :]))
    np.testing.assert_allclose(after[name], w + ALPHA / RANK * change, rtol=1e-5, atol=1e-5)
  count = lambda role: factors[f"layer_0/{role}/a"].shape[0]
  assert count("moe/experts/w1") == SETTINGS.model.moe.experts
  assert count("attn/wo_a") == SETTINGS.model.attention.o_groups


def test_it_begins_with_exactly_the_given_weights(params):
  given = low_rank.with_factors(params, CFG, jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, low_rank.merged(given, CFG), params)
  for name, factor in leaves(given["low_rank"]).items():
    inputs = factor.shape[-2]
    assert not np.any(factor) if name.endswith("/b") else np.std(factor) * inputs**0.5 < 1.5
    assert name.endswith("/b") or len(np.unique(factor)) > 0.99 * factor.size - 1, "no two alike"
  off = LowRankConfig()
  assert low_rank.with_factors(params, off, jax.random.key(1)) is params
  assert low_rank.merged(params, off) is params


def test_a_checkpoint_gives_back_what_was_merged(params):
  given = changed(params)
  merged = low_rank.merged(given, CFG)
  base = low_rank.changed_matrices(given)
  assert set(leaves(base)) == {n.rpartition("/")[0] for n in leaves(given["low_rank"])}
  jax.tree.map(np.testing.assert_array_equal, low_rank.with_matrices(merged, base), params)


def test_only_factors_train(params):
  params = {name: params[name] for name in ("embed", "layer_0")}
  optim = dataclasses.replace(SETTINGS.optim, low_rank=CFG, matrices="muon", warmup_steps=0)
  optimizer = make_optimizer(optim, [Span(10, 1)], SETTINGS.model.engram)

  @jax.jit
  def step(given):
    def loss(given):
      weights = low_rank.merged(frozen.without_gradient(given, frozen.frozen_names(optim)), CFG)
      return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(weights))

    gradients = jax.grad(loss)(given)
    updates, state = optimizer.update(gradients, optimizer.init(given), given)
    return optax.apply_updates(given, updates), state

  given = changed(params)
  moved, state = step(given)
  jax.tree.map(np.testing.assert_array_equal, low_rank.without_factors(moved), params)
  for name, factor in leaves(moved["low_rank"]).items():
    assert not np.array_equal(factor, leaves(given["low_rank"])[name]), name
  sizes = [x.size for x in jax.tree.leaves(given["low_rank"])]
  assert sum(x.size for x in jax.tree.leaves(state) if x.ndim) == 2 * sum(sizes)


def test_factors_lie_on_the_mesh_like_their_matrices(boxed):
  mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2), jax.devices()[:8])
  found = low_rank.with_boxes(boxed, CFG)
  shapes = jax.eval_shape(
    lambda: low_rank.with_factors(
      jax.tree.map(lambda x: jnp.zeros(x.shape), nn.unbox(boxed)), CFG, jax.random.key(0)
    )
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), nn.unbox(found), shapes
  )
  spec = {name: sharding.spec for name, sharding in leaves(state_shardings(found, mesh)).items()}
  place = lambda role, f: tuple(spec[f"low_rank/layer_0/{role}/{f}"])
  assert place("moe/experts/w1", "a") == ("expert", "fsdp", None)
  assert place("moe/experts/w1", "b") == ("expert", None, "tensor")
  assert place("attn/wq_b", "b") == (None, "tensor", None)
  repeated = next(
    n for n in spec if n.startswith("low_rank/layers_") and n.endswith("experts/w1/a")
  )
  assert tuple(spec[repeated]) == (None, "expert", "fsdp", None)
