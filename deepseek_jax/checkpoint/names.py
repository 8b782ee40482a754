"""Trees as stored: nested dicts keyed by name, so that no class of ours or optax's is on disk.

A leaf's name is its path, for example "0/mu/layers_0_1/attention/q". Nodes without leaves (an
optimizer's empty state) are not stored; the tree restored into brings them back.
"""

from typing import Any

import jax
import numpy as np

from deepseek_jax.checkpoint.errors import CheckpointError

SHOWN = 3  # differing parameters named in an error


def named_leaves(tree: Any) -> dict[str, Any]:
  """Leaves by name, in the tree's order."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def to_nested(tree: Any) -> dict[str, Any]:
  """The tree as dicts within dicts, keyed by the parts of the leaves' names."""
  nested: dict[str, Any] = {}
  for name, leaf in named_leaves(tree).items():
    *folders, last = name.split("/")
    node = nested
    for folder in folders:
      node = node.setdefault(folder, {})
    node[last] = leaf
  return nested


def from_nested(nested: dict[str, Any], like: Any) -> Any:
  """The leaves of `nested` in the structure of `like`, whose names they have."""
  leaves = named_leaves(nested)
  return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in named_leaves(like)])


def check_same(item: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
  """Raises CheckpointError naming the first leaves that differ in name, shape or dtype."""
  kind = lambda leaf: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
  phrases = [f"{name} is not in the checkpoint" for name in wanted if name not in stored]
  phrases += [f"{name} is only in the checkpoint" for name in stored if name not in wanted]
  phrases += [
    f"{name} is {kind(stored[name])} in the checkpoint and {kind(wanted[name])} here"
    for name in wanted
    if name in stored and kind(stored[name]) != kind(wanted[name])
  ]
  if phrases:
    more = f", and {len(phrases) - SHOWN} more" if len(phrases) > SHOWN else ""
    raise CheckpointError(
      f"The checkpoint's {item} do not fit the configuration: {'; '.join(phrases[:SHOWN])}{more}."
    )
