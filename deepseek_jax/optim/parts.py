"""Norms of gradients and updates by part of the model."""

from collections import defaultdict
from typing import Any

import jax
import optax

# The first that occurs in a parameter's path names its part; "other" are gains and the like.
_PARTS = ("hc_", "indexer", "compressor", "engram", "attn", "experts", "shared", "moe")
_NAMES = {"attn": "attention", "moe": "router", "hc_": "hyper_connections"}


def norms(tree: Any) -> dict[str, jax.Array]:
  """Square root of the sum of squares, float32, of every part that the tree has parameters of."""
  members = defaultdict(list)
  for path, leaf in jax.tree.leaves_with_path(tree):
    members[_part(jax.tree_util.keystr(path, simple=True, separator="/"))].append(leaf)
  return {part: optax.global_norm(leaves) for part, leaves in sorted(members.items())}


def _part(path: str) -> str:
  if path in ("embed", "head"):
    return path
  part = next((part for part in _PARTS if part in path), "other")
  return _NAMES.get(part, part)
