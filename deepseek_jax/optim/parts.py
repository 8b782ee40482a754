"""Norms of gradients and updates by part of the model."""

from collections import defaultdict
from typing import Any

import jax
import optax

from deepseek_jax.optim.partition import role

# Beginning of a parameter's role -> its part; the first that fits. Others are gains of a layer.
_PARTS = {
  "embed": "embed",
  "head": "head",
  "hc_": "hyper_connections",
  "engram": "engram",
  "attn/indexer": "indexer",
  "attn/compressor": "compressor",
  "attn": "attention",
  "moe/experts": "experts",
  "moe/shared": "shared",
  "moe": "router",
}


def norms(tree: Any) -> dict[str, jax.Array]:
  """Square root of the sum of squares, float32, of every part that the tree has parameters of."""
  members = defaultdict(list)
  for path, leaf in jax.tree.leaves_with_path(tree):
    members[_part(role(path))].append(leaf)
  return {part: optax.global_norm(leaves) for part, leaves in sorted(members.items())}


def _part(key: str) -> str:
  return next((part for begins, part in _PARTS.items() if key.startswith(begins)), "other")
