"""Norms by part add up to the norm of all, and every part of the backbone has its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from configs import tiny
from configs.schema import Settings
from deepseek_jax.model import Model
from deepseek_jax.optim.parts import norms, sampled
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
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


@pytest.mark.parametrize("shape", [(1 << 16, 16), (2, 8, 1024, 64), (1024, 8, 128)])
def test_a_norm_of_sampled_rows_is_nearly_that_of_all(shape):
  rng = np.random.default_rng(0)
  for numbers in (rng.normal(size=shape), np.sign(rng.normal(size=shape))):
    tree = {"embed": jnp.asarray(numbers, jnp.float32)}
    rows = sampled(tree)
    assert rows["embed"].size * 16 == tree["embed"].size
    found, want = (float(norms(t)["embed"]) for t in (rows, tree))
    np.testing.assert_allclose(found, want, rtol=1e-2)


def test_small_arrays_and_those_of_other_lengths_are_whole():
  tree = {
    "embed": jnp.ones((16, 16)),
    "head": jnp.ones((1 << 20) + 1),
    "hc_fn": jnp.ones((100, 15000)),
  }
  kept = sampled(tree)
  assert all(kept[name] is tree[name] for name in tree)


def test_no_row_of_a_sharded_array_travels():
  mesh = make_mesh(MeshConfig(fsdp=8))
  laid = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  struct = jax.ShapeDtypeStruct((2, 1 << 16, 16), jnp.float32, sharding=laid)
  text = jax.jit(lambda x: norms(sampled({"embed": x}))).lower(struct).compile().as_text()
  moved = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute|all-reduce)\(", text)
  assert moved and set(moved) <= {"f32[]"}
