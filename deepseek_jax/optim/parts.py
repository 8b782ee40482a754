"""Norms of gradients and updates by part of the model."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
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
# Float8_e5m2 has 2 of float32's 23 bits behind the point, and magnitudes from 2^-14 (below that
# with fewer bits) to 57,344: with this scale updates of 4e-9 to 3.5; larger ones count as 3.5.
_DROPPED_BITS, _BYTE_SCALE, _E5M2_LARGEST = 21, 2.0**14, 57_344.0
_GOLDEN = 2_654_435_769  # 2^32 / 1.618: its multiples fill 32 bits evenly
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
  wants written and read; health metrics may cost 1% of a step (docs/log.md).

  Which way an element is rounded depends on its column too, in proportion to the distances, so that
  roundings cancel where all magnitudes are equal as well, as they are in Adam's first update. A
  norm grows by less than 1% of itself.
  """

  def rounded(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x * _BYTE_SCALE, jnp.uint32)
    column = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    bits += column * np.uint32(_GOLDEN) >> 32 - _DROPPED_BITS
    kept = bits >> _DROPPED_BITS << _DROPPED_BITS
    scaled = jax.lax.bitcast_convert_type(kept, jnp.float32)
    scaled = jnp.clip(scaled, -_E5M2_LARGEST, _E5M2_LARGEST)
    byte = jax.lax.optimization_barrier(scaled.astype(jnp.float8_e5m2))
    return byte.astype(jnp.float32) / _BYTE_SCALE

  return jax.tree.map(rounded, tree)


def part(key: str) -> str:
  """The part that a role belongs to."""
  return next((part for begins, part in _PARTS.items() if key.startswith(begins)), "other")
