"""Which parameter the optimizer treats how, by its name inside a layer. Nothing is left to a rule
on shapes: stacked biases look like matrices.
"""

import enum
from typing import Any

import jax


class Group(enum.Enum):
  """Source: model.md section 6.2, columns weight decay and learning rate."""

  DECAYED = "decayed"  # matrices, and all norm gains
  PLAIN = "plain"  # no weight decay: embeddings, biases, scales, sinks
  TABLE = "table"  # Engram tables: no weight decay, higher learning rate


_NAMES = {
  Group.DECAYED: (
    "norm",
    "attn_norm",
    "ffn_norm",
    "attn/wq_a",
    "attn/wq_b",
    "attn/wkv",
    "attn/wo_a",
    "attn/wo_b",
    "attn/q_norm",
    "attn/kv_norm",
    "attn/compressor/wkv",
    "attn/compressor/wgate",
    "attn/compressor/norm",
    "attn/indexer/wq_b",
    "attn/indexer/weights_proj",
    "attn/indexer/wk",
    "attn/indexer/k_norm",
    "hc_attn/fn",
    "hc_ffn/fn",
    "moe/gate",
    "moe/experts/w1",
    "moe/experts/w2",
    "moe/experts/w3",
    "moe/shared/w1",
    "moe/shared/w2",
    "moe/shared/w3",
    "engram/wkv",
    "engram/q_weight",
    "engram/k_weight",
  ),
  Group.PLAIN: (
    "embed",
    "head",
    "attn/sink",
    "hc_attn/base",
    "hc_attn/scale",
    "hc_ffn/base",
    "hc_ffn/scale",
  ),
  Group.TABLE: ("engram/table",),
}
_GROUP = {name: group for group, names in _NAMES.items() for name in names}


def groups(params: dict) -> dict:
  """A tree like params with the Group of each parameter.

  Raises: ValueError that names every parameter without a group.
  """
  unassigned = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree.leaves_with_path(params)
    if _name(path) not in _GROUP
  ]
  if unassigned:
    raise ValueError(f"no optimizer group is known for the parameters {unassigned}.")
  return jax.tree.map_with_path(lambda path, _: _GROUP[_name(path)], params)


def is_group(group: Group):
  """params -> tree of bool, for the masks of optax."""
  return lambda params: jax.tree.map(lambda g: g is group, groups(params))


def _name(path: tuple[Any, ...]) -> str:
  """The path without the keys that say which layer it is."""
  keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
  return "/".join(key for key in keys if not key.startswith(("layer_", "layers_")))
