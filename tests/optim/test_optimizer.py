"""One update of each group is its rule's; the state is float32 and named like the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deepseek_jax.checkpoint.names import named_leaves
from deepseek_jax.config import EngramConfig
from deepseek_jax.optim.optimizer import like_parameters, make_optimizer, update_count
from deepseek_jax.optim.schedule import Span
from deepseek_jax.training_config import OptimConfig

CFG = OptimConfig(peak_lr=0.01, final_lr=0.01, warmup_steps=0, weight_decay=0.1, clip_norm=1e9)
ENGRAM = EngramConfig(layers=(0,), table_rows=(3,), head_dim=2)
VALUE, GRADIENT = jnp.array([[2.0, -2.0]] * 4), jnp.array([[0.5, 0.0]] * 3 + [[0.0, 0.0]])
PARAMS = {
  "embed": VALUE,
  "layer_0": {
    "attn": {"sink": VALUE, "wkv": VALUE},
    "engram": {"table": VALUE},
  },
  "norm": VALUE,
}
GRADS = jax.tree.map(lambda w: GRADIENT, PARAMS)


def first_update(**changes):
  optimizer = make_optimizer(OptimConfig(**(vars(CFG) | changes)), [Span(10, 1)], ENGRAM)
  return optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)


def of(updates):
  layer = updates["layer_0"]
  return [updates["embed"], layer["engram"]["table"], layer["attn"]["wkv"]] + [
    updates["norm"],
    layer["attn"]["sink"],
  ]


def test_every_group_moves_by_its_rule_factor_and_decay():
  embed, table, wkv, norm, sink = of(first_update()[0])
  row = np.array([0.18 * np.sqrt(2), 0.0])  # all of a row is in its first channel
  rows = np.array([row, row, row, [0, 0]])
  np.testing.assert_allclose(embed, -0.01 * rows, rtol=1e-5)
  np.testing.assert_allclose(table, 5 * -0.01 * rows, rtol=1e-5)
  rank_one = 0.18 * np.sqrt(4) * rows / np.linalg.norm(rows)  # its singular value becomes 1
  np.testing.assert_allclose(wkv, -0.01 * (rank_one + 0.1 * VALUE), rtol=1e-3)
  adam = np.array([[1.0, 0.0]] * 3 + [[0.0, 0.0]])
  np.testing.assert_allclose(norm, -0.01 * (adam + 0.1 * VALUE), rtol=1e-5)
  np.testing.assert_allclose(sink, -0.01 * adam, rtol=1e-5)


def test_adamw_everywhere_keeps_factors_and_decay():
  embed, table, wkv, norm, sink = of(first_update(matrices="adamw")[0])
  adam = np.array([[1.0, 0.0]] * 3 + [[0.0, 0.0]])
  np.testing.assert_allclose(table, 5 * -0.01 * adam, rtol=1e-5)
  for plain in (embed, sink):
    np.testing.assert_allclose(plain, -0.01 * adam, rtol=1e-5)
  for decayed in (wkv, norm):
    np.testing.assert_allclose(decayed, -0.01 * (adam + 0.1 * VALUE), rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [0.3, 100.0])
def test_the_global_norm_is_clipped_before_the_moments(clip_norm):
  _, state = first_update(clip_norm=clip_norm)
  wanted = 0.5 * min(1.0, clip_norm / optax.global_norm(GRADS))
  named = named_leaves(state)
  (momentum,) = [x for name, x in named.items() if name.endswith("/layer_0/attn/wkv")]
  (mean,) = [x for name, x in named.items() if name.endswith("mu/norm")]
  np.testing.assert_allclose(momentum[0, 0], wanted, rtol=1e-5)
  np.testing.assert_allclose(mean[0, 0], 0.1 * wanted, rtol=1e-5)


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_states_are_float32_and_their_names_end_with_the_parameter_s(matrices):
  _, state = first_update(matrices=matrices)
  arrays = {name: x for name, x in named_leaves(state).items() if not name.endswith("count")}
  assert {x.dtype for x in arrays.values()} == {jnp.dtype("float32")}
  kept = {
    parameter: [name for name in arrays if name.endswith(f"/{parameter}")]
    for parameter in named_leaves(PARAMS)
  }
  adam = {"layer_0/attn/sink", "norm"} if matrices == "muon" else set(kept)
  assert {p: len(names) for p, names in kept.items()} == {p: 1 + (p in adam) for p in kept}
  assert len(arrays) == sum(len(names) for names in kept.values())


def test_states_take_what_is_given_for_their_parameter_and_counters_the_rest():
  _, state = first_update()
  names = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path), PARAMS)
  for name, given in named_leaves(like_parameters(state, names, "elsewhere")).items():
    keys = "".join(f"['{key}']" for key in name.split("/"))
    assert given == "elsewhere" if name.endswith("count") else keys.endswith(given)


def test_update_count_is_the_argument_of_the_schedule():
  optimizer = make_optimizer(CFG, [Span(10, 1)], ENGRAM)
  state = optimizer.init(PARAMS)
  assert update_count(state) == 0
  assert update_count(optimizer.update(GRADS, state, PARAMS)[1]) == 1


def test_an_unknown_parameter_is_refused_on_init():
  optimizer = make_optimizer(CFG, [Span(10, 1)], ENGRAM)
  with pytest.raises(ValueError, match=r"no optimizer group .* \['layer_0/attn/wx'\]"):
    optimizer.init({"layer_0": {"attn": {"wx": VALUE}}})
