"""On eight devices every rule gives what it gives on one, and Newton-Schulz is shared out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from deepseek_jax.config import EngramConfig
from deepseek_jax.optim.muon import newton_schulz, scale_by_muon
from deepseek_jax.optim.optimizer import like_parameters, make_optimizer
from deepseek_jax.optim.schedule import Span
from deepseek_jax.sharding import make_mesh, partition_spec
from deepseek_jax.training_config import MeshConfig, OptimConfig

MESHES = {
  "fsdp and experts": MeshConfig(fsdp=2, expert=4),
  "fsdp, experts and context": MeshConfig(fsdp=2, expert=2, context=2),
  "replicas and heads": MeshConfig(replica=2, fsdp=2, tensor=2),
}
ENGRAM = EngramConfig(layers=(1,), table_rows=(1000,), head_dim=8)
DECLARED = {  # shape and logical axes, as deepseek_jax/nn declares them
  "embed": ((64, 16), ("vocab", "embed")),
  "head": ((64, 16), ("vocab", "embed")),
  "norm": ((16,), ("embed",)),
  "layer_1": {
    "engram": {
      "table": ((1024, 8), ("table_rows", None)),
      "wkv": ((24, 80), (None, "embed")),
      "q_weight": ((4, 16), (None, "embed")),
    },
    "attn": {
      "wq_b": ((16, 4, 8), ("embed", "heads", None)),
      "wo_a": ((2, 24, 8), ("heads", "embed", None)),
      "wo_b": ((24, 16), ("heads", "embed")),
    },
  },
  "layers_2_5": {
    "layer_0": {
      "attn": {
        "wkv": ((2, 16, 6), ("layers", "embed", None)),
        "wq_b": ((2, 16, 4, 8), ("layers", "embed", "heads", None)),
        "sink": ((2, 4), ("layers", "heads")),
      },
      "hc_ffn": {"fn": ((2, 24, 4, 16), ("layers", None, None, "embed"))},
      "moe": {
        "gate": ((2, 16, 4), ("layers", "embed", None)),
        "experts": {
          "w1": ((2, 4, 16, 24), ("layers", "experts", "embed", "mlp")),
          "w2": ((2, 4, 24, 16), ("layers", "experts", "mlp", "embed")),
        },
      },
    }
  },
}


def declared(fn):
  """A tree of fn(shape, logical axes)."""
  is_leaf = lambda value: isinstance(value, tuple)
  return jax.tree.map(lambda leaf: fn(*leaf), DECLARED, is_leaf=is_leaf)


def random(seed):
  rng = np.random.default_rng(seed)

  def values(shape, names):
    x = rng.standard_normal(shape).astype(np.float32)
    if names[0] == "table_rows":
      x[1000:] = 0  # rows that only let devices share the table
      x[: 1000 : 2 + seed] = 0  # rows that no token read in this step
    return x

  return declared(values)


def updates(optimizer, params, state, gradients, **shardings):
  """Parameters and state after an update for each of the gradients."""

  def update(params, state, gradient):
    moved, state = optimizer.update(gradient, state, params)
    return jax.tree.map(jnp.add, params, moved), state

  step = jax.jit(update, **shardings)
  for gradient in gradients:
    params, state = step(params, state, gradient)
  return params, state


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param("fsdp and experts", marks=pytest.mark.slow),
    "fsdp, experts and context",
    pytest.param("replicas and heads", marks=pytest.mark.slow),
  ],
)
def test_every_rule_on_a_mesh_is_the_rule_on_one_device(mesh):
  cfg = OptimConfig(peak_lr=1.0, final_lr=1.0, warmup_steps=0, clip_norm=5.0)
  optimizer = make_optimizer(cfg, [Span(10, 1)], ENGRAM)
  params, gradients = random(0), [random(seed) for seed in (1, 2, 3)]
  state = optimizer.init(params)
  want = updates(optimizer, params, state, gradients)

  mesh = make_mesh(MESHES[mesh])
  place = lambda shape, names: NamedSharding(mesh, partition_spec(names, shape, mesh))
  of_params, everywhere = declared(place), NamedSharding(mesh, PartitionSpec())
  of_state = like_parameters(state, of_params, everywhere)
  with jax.set_mesh(mesh):
    params, state = jax.device_put((params, state), (of_params, of_state))
    gradients = jax.device_put(gradients, [of_params] * len(gradients))
    got = updates(optimizer, params, state, gradients, out_shardings=(of_params, of_state))

  for (path, w), g in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
    scale = max(1.0, np.abs(w).max())
    np.testing.assert_allclose(g, w, atol=1e-5 * scale, rtol=0, err_msg=jax.tree_util.keystr(path))


def flops(shape, along=None, sharding=None):
  x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
  work = jax.jit(lambda x: newton_schulz(x, along=along))
  return work.lower(x).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
  ("shape", "names", "share"),
  [
    ((8, 2, 32, 64), ("experts", "layers", None, "embed"), 1 / 8),  # a matrix for each device
    ((4, 1, 32, 64), ("experts", "layers", None, "embed"), 1 / 6),  # half of one: A A is done twice
    ((1, 32, 256), ("layers", None, "embed"), 1 / 5),  # an eighth of its columns
  ],
)
def test_a_device_does_its_share_of_newton_schulz(shape, names, share):
  alone = flops(shape)
  mesh = make_mesh(MESHES["fsdp and experts"])
  with jax.set_mesh(mesh):
    along = "experts" if names[0] == "experts" else None
    on_a_mesh = flops(shape, along, NamedSharding(mesh, partition_spec(names, shape, mesh)))
  assert on_a_mesh <= 1.1 * share * alone


@pytest.mark.parametrize("mesh", ["fsdp and experts", "fsdp, experts and context"])
@pytest.mark.parametrize(
  ("shape", "names"),
  [
    ((2, 16, 64), ("layers", "embed", None)),  # cut along its rows, and two layers at a time
    ((2, 8, 16, 24), ("layers", "experts", "embed", None)),
    ((2, 8, 24, 16), ("layers", "experts", None, "embed")),
  ],
)
def test_no_device_ever_holds_all_matrices(mesh, shape, names):
  mesh = make_mesh(MESHES[mesh])
  placed = NamedSharding(mesh, partition_spec(names, shape, mesh))
  rule = scale_by_muon(
    lambda _: MuonDimensionNumbers(-2, -1),
    lambda _: "experts" if "experts" in names else None,
    momentum=0.0,
    rms=0.18,
    dtype="float32",
  )
  eight = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)] * 8
  with jax.set_mesh(mesh):
    state = like_parameters(jax.eval_shape(rule.init, eight), eight, None)
    update = jax.jit(lambda g, s: rule.update(g, s)[0], out_shardings=[placed] * 8)
    program = update.lower(eight, state).compile().as_text()
  assert "all-to-all" in program and "all-gather" not in program
