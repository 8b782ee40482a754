"""What happens to every parameter of the model is pinned, and none is left out.

The tables of `tiny` and `flash` are in rules_*.txt. To write them anew after a change that is
meant, delete the file and run this test twice.
"""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from configs.schema import Settings
from deepseek_jax.config import EngramConfig
from deepseek_jax.model import Model
from deepseek_jax.optim import partition
from deepseek_jax.optim.partition import Group, groups
from deepseek_jax.training_config import OptimConfig
from train.batches import empty_row

HERE = pathlib.Path(__file__).parent
PARAMS = {
  "embed": jnp.zeros((6, 2)),
  "layer_3": {"attn": {"sink": jnp.zeros(2), "wq_b": jnp.zeros((3, 5, 2))}},
  "layers_4_7": {
    "layer_0": {"attn_norm": jnp.zeros((2, 4)), "moe": {"gate": jnp.zeros((2, 4, 3))}}
  },
}


def table_of(config):
  settings = Settings.from_dict(importlib.import_module(f"configs.{config}").get_config().to_dict())
  shapes = jax.eval_shape(Model(settings.model).init, jax.random.key(0), empty_row(settings))
  rows = partition.rows(nn.unbox(shapes)["params"], settings.optim, settings.model.engram)
  return "\n".join(" | ".join(words) for words in partition.table(rows)) + "\n"


@pytest.mark.parametrize("config", ["tiny", "flash"])
def test_the_table_of_rules_is_the_recorded_one(config):
  stored, found = HERE / f"rules_{config}.txt", table_of(config)
  if not stored.exists():
    stored.write_text(found)
    pytest.fail(f"{stored} was missing and has been written")
  assert found == stored.read_text()


def test_groups_go_by_the_role_and_not_by_the_shape():
  assert groups(PARAMS) == {
    "embed": Group.EMBEDDING,
    "layer_3": {"attn": {"sink": Group.PLAIN, "wq_b": Group.MATRIX}},
    "layers_4_7": {"layer_0": {"attn_norm": Group.GAIN, "moe": {"gate": Group.MATRIX}}},
  }


def test_rows_say_which_matrices_a_parameter_holds_and_how_they_move():
  cfg = OptimConfig(weight_decay=0.25)
  rows = {row.name: row for row in partition.rows(PARAMS, cfg, EngramConfig())}
  told = lambda name: tuple(rows[name])[3:]
  assert told("embed") == ("Sinkhorn", 1, (6, 2), 1.0, 0.0)
  assert told("layer_3/attn/wq_b") == ("Muon", 5, (2, 3), 1.0, 0.25)  # one for each head
  assert told("layers_4_7/layer_0/moe/gate") == ("Muon", 2, (3, 4), 1.0, 0.25)
  assert told("layers_4_7/layer_0/attn_norm") == ("AdamW", 0, None, 1.0, 0.25)
  assert told("layer_3/attn/sink") == ("AdamW", 0, None, 1.0, 0.0)


def test_a_table_has_its_own_learning_rate_and_only_the_rows_that_exist():
  engram = EngramConfig(layers=(1, 5), table_rows=(700, 900), head_dim=4)
  params = {"layer_5": {"engram": {"table": jnp.zeros((1024, 4))}}}
  (row,) = partition.rows(params, OptimConfig(table_lr=3.0), engram)
  assert (row.rule, row.matrix, row.lr, row.decay) == ("Sinkhorn", (900, 4), 3.0, 0.0)


def test_with_adamw_everywhere_factors_stay():
  engram = EngramConfig(layers=(1,), table_rows=(700,), head_dim=4)
  params = PARAMS | {"layer_1": {"engram": {"table": jnp.zeros((1024, 4))}}}
  rows = partition.rows(params, OptimConfig(matrices="adamw"), engram)
  assert {row.rule for row in rows} == {"AdamW"}
  assert {row.role: (row.lr, row.decay) for row in rows} == {
    "embed": (1.0, 0.0),
    "attn/sink": (1.0, 0.0),
    "attn/wq_b": (1.0, 0.1),
    "attn_norm": (1.0, 0.1),
    "moe/gate": (1.0, 0.1),
    "engram/table": (5.0, 0.0),
  }


def test_unassigned_parameters_are_all_named():
  params = PARAMS | {"layer_9": {"attn": {"wq": jnp.zeros(2)}}, "gain": jnp.zeros(2)}
  with pytest.raises(ValueError, match=r"\['gain', 'layer_9/attn/wq'\]"):
    groups(params)


def test_a_name_counts_only_in_its_place():
  with pytest.raises(ValueError, match="layer_9/table"):
    groups({"layer_9": {"table": jnp.zeros(2)}})
