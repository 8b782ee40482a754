"""Norms of gradients and updates by part of the model."""

from collections import defaultdict
from typing import Any

import jax
import numpy as np
import optax

from deepseek_jax.optim.partition import LOW_RANK, role

# Beginning of a parameter's role -> its part; the first that fits. Others are gains of a layer.
_PARTS = {
  LOW_RANK: LOW_RANK,
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
# Arrays of fewer elements are read whole: together they are 0.1% of configs/small.py.
_LARGE = 1 << 20
_STRIDE = 16
PARTS = (*dict.fromkeys(_PARTS.values()), "other")


def norms(tree: Any) -> dict[str, jax.Array]:
  """Square root of the sum of squares, float32, of every part that the tree has parameters of."""
  members = defaultdict(list)
  for path, leaf in jax.tree.leaves_with_path(tree):
    members[part(role(path))].append(leaf)
  return {part: optax.global_norm(leaves) for part, leaves in sorted(members.items())}


def sampled(tree: Any) -> Any:
  """Of each large array every 16th row, times 4: the norm of these estimates that of all rows.

  A step does not write its updates down, so a norm of them takes a second pass over gradients,
  weights and moments: for configs/small.py 80 GB or 2% of a step, where all health metrics may
  cost 1%; a sixteenth of that goes unnoticed (docs/log.md).

  Rows are counted along the longest axis but the last. They leave the array in one piece for each
  device that has a part of it, so nothing travels. An array whose rows 16 does not divide is whole.
  """

  def rows(x: jax.Array) -> jax.Array:
    if x.size < _LARGE or x.ndim < 2:
      return x
    axis = int(np.argmax(x.shape[:-1]))
    if x.shape[axis] % _STRIDE:
      return x
    groups = x.shape[axis] // _STRIDE
    grouped = x.reshape(*x.shape[:axis], groups, _STRIDE, *x.shape[axis + 1 :])
    return jax.lax.index_in_dim(grouped, 0, axis + 1, keepdims=False) * np.sqrt(_STRIDE)

  return jax.tree.map(rows, tree)


def part(key: str) -> str:
  """The part that a role belongs to."""
  return next((part for begins, part in _PARTS.items() if key.startswith(begins)), "other")
