"""Norms of gradients and updates by part of the model."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
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
# Float8_e5m2 has magnitudes from 2^-16 to 57,344: updates of 1e-9 to 3.5 stay in it.
_BYTE_SCALE = 2.0**14
PARTS = (*dict.fromkeys(_PARTS.values()), "other")


def norms(tree: Any) -> dict[str, jax.Array]:
  """Square root of the sum of squares, float32, of every part that the tree has parameters of."""
  members = defaultdict(list)
  for path, leaf in jax.tree.leaves_with_path(tree):
    members[part(role(path))].append(leaf)
  return {part: optax.global_norm(leaves) for part, leaves in sorted(members.items())}


def in_a_byte(tree: Any) -> Any:
  """The tree rounded to float8_e5m2, in memory, and back in float32: for norms of what a step would
  otherwise not write down. AdamW's updates of configs/small.py are 26 GB in float32, which a norm
  wants written and read; a quarter of that is what health metrics may cost (docs/log.md). A norm
  moves by about 2e-3 of itself, for roundings of many elements nearly cancel.
  """

  def rounded(x: jax.Array) -> jax.Array:
    byte = jax.lax.optimization_barrier((x * _BYTE_SCALE).astype(jnp.float8_e5m2))
    return byte.astype(jnp.float32) / _BYTE_SCALE

  return jax.tree.map(rounded, tree)


def part(key: str) -> str:
  """The part that a role belongs to."""
  return next((part for begins, part in _PARTS.items() if key.startswith(begins)), "other")
