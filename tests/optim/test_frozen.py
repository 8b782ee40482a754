"""What is frozen stays as it is, bit for bit, costs no memory, and is not counted in norms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deepseek_jax.config import EngramConfig
from deepseek_jax.optim import frozen
from deepseek_jax.optim.optimizer import make_optimizer
from deepseek_jax.optim.schedule import Span
from deepseek_jax.training_config import OptimConfig

CFG = OptimConfig(peak_lr=0.01, final_lr=0.01, warmup_steps=0, clip_norm=1.0)
ENGRAM = EngramConfig(layers=(1,), table_rows=(6,))


def parameters():
  keys = iter(jax.random.split(jax.random.key(0), 9))
  normal = lambda *shape: jax.random.normal(next(keys), shape)
  indexer = {"wq_b": normal(4, 2, 3), "weights_proj": normal(4, 2), "k_norm": normal(3)}
  attention = {"wkv": normal(4, 4), "sink": normal(2), "indexer": indexer}
  layer = {"attn": attention, "ffn_norm": normal(4), "engram": {"table": normal(8, 4)}}
  return {"embed": normal(9, 4), "layer_1": layer}


def names(tree):
  return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in
          jax.tree.leaves_with_path(tree)}  # fmt: skip


def steps(params, *given, count=2, matrices="adamw"):
  cfg = dataclasses.replace(CFG, frozen=given, matrices=matrices)
  optimizer = make_optimizer(cfg, [Span(10, 1)], ENGRAM)
  state = optimizer.init(params)
  loss = lambda p: sum(
    jnp.sum(jnp.square(x)) for x in jax.tree.leaves(frozen.without_gradient(p, given))
  )

  @jax.jit
  def run(params, state):
    for _ in range(count):
      updates, state = optimizer.update(jax.grad(loss)(params), state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  return run(params, state)


@pytest.mark.parametrize(
  ("given", "still"),
  [
    ((), set()),
    (("indexer",), {"wq_b", "weights_proj", "k_norm"}),
    (("attn/indexer/wq_b", "attn/sink"), {"wq_b", "sink"}),
    (("embed", "attention", "engram", "other"), {"embed", "wkv", "sink", "table", "ffn_norm"}),
  ],
  ids=["none", "indexer", "two_roles", "parts"],
)
def test_parts_and_roles_do_not_move_and_have_no_state(given, still):
  params = parameters()
  moved, state = steps(params, *given, matrices="muon" if given == ("indexer",) else "adamw")
  old, new = (dict(jax.tree.leaves_with_path(tree)) for tree in (params, moved))
  same = {path[-1].key for path in old if np.array_equal(old[path], new[path])}
  assert same == still
  kept = {name.rpartition("/")[2] for name in names(state)}
  assert not kept & still and kept >= {path[-1].key for path in old} - still


def test_a_frozen_parameter_has_no_part_in_the_norm_that_is_clipped():
  params = parameters()
  large = params | {"embed": 1e6 * params["embed"]}
  alone, with_large = (steps(p, "embed", count=1)[0]["layer_1"] for p in (params, large))
  jax.tree.map(np.testing.assert_array_equal, alone, with_large)


def test_names_are_those_of_the_tables():
  assert {"indexer", "router", "other", "attn/indexer/wk", "engram/table"} <= set(frozen.names())
