"""Every parameter name of the model and the group it belongs to, pinned."""

import jax.numpy as jnp
import pytest

from deepseek_jax.optim.partition import Group, groups

ATTENTION = {name: Group.DECAYED for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")} | {
  "q_norm": Group.DECAYED,
  "kv_norm": Group.DECAYED,
  "sink": Group.PLAIN,
  "compressor": {name: Group.DECAYED for name in ("wkv", "wgate", "norm")},
  "indexer": {name: Group.DECAYED for name in ("wq_b", "weights_proj", "wk", "k_norm")},
}
HYPER_CONNECTION = {"fn": Group.DECAYED, "base": Group.PLAIN, "scale": Group.PLAIN}
EXPERTS = {name: Group.DECAYED for name in ("w1", "w2", "w3")}
LAYER = {
  "attn": ATTENTION,
  "attn_norm": Group.DECAYED,
  "ffn_norm": Group.DECAYED,
  "hc_attn": HYPER_CONNECTION,
  "hc_ffn": HYPER_CONNECTION,
  "moe": {"gate": Group.DECAYED, "experts": EXPERTS, "shared": EXPERTS},
  "engram": {
    "table": Group.TABLE,
    "wkv": Group.DECAYED,
    "q_weight": Group.DECAYED,
    "k_weight": Group.DECAYED,
  },
}
MODEL = {
  "embed": Group.PLAIN,
  "head": Group.PLAIN,
  "norm": Group.DECAYED,
  "layer_3": LAYER,
  "layers_4_7": {"layer_0": LAYER, "layer_1": LAYER},
}


def arrays(tree):
  return {
    name: arrays(value) if isinstance(value, dict) else jnp.zeros(2) for name, value in tree.items()
  }


def test_groups_are_the_recipes():
  assert groups(arrays(MODEL)) == MODEL


def test_unassigned_parameters_are_all_named():
  params = arrays(MODEL) | {"layer_9": {"attn": {"wq": jnp.zeros(2)}}, "gain": jnp.zeros(2)}
  with pytest.raises(ValueError, match=r"\['gain', 'layer_9/attn/wq'\]"):
    groups(params)


def test_a_name_counts_only_in_its_place():
  with pytest.raises(ValueError, match="layer_9/table"):
    groups({"layer_9": {"table": jnp.zeros(2)}})
