"""Adds rows to those of an array by number, in a fixed order.

Legend: N rows of the array, C rows that are added, F channels of a row, k pieces of a row, w width
of a piece.
"""

import math

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch

# Channels that one program of the GPU kernel adds up: of the widest rows that it was measured with.
_PIECE = 512


def add_rows(
  acc_NF: jax.Array, place_C: jax.Array, rows_CF: jax.Array, *, implementation: str | None = None
) -> jax.Array:
  """acc[n] + sum of the rows whose place is n.

  Args:
    acc_NF: float32.
    place_C: int32, in any order and with repeats; -1 adds nothing.
    rows_CF: bfloat16 or float32; added in float32.
    implementation: "reference" or "pallas_triton" (GPUs); None picks.
  """
  return dispatch.call(_IMPLEMENTATIONS, implementation, acc_NF, place_C, rows_CF)


def _scatter(acc_NF, place_C, rows_CF):
  """On a CPU and a TPU in the order of the rows; on a GPU atomics land in any order."""
  place_C = jnp.where(place_C < 0, len(acc_NF), place_C)
  return acc_NF.at[place_C].add(rows_CF.astype(jnp.float32), mode="drop")


def _sum_sorted(acc_NF, place_C, rows_CF):
  """Sorted by place, then summed by the kernel that sums attention's rows.

  It takes rows whose width is a power of two, so rows are cut into k of them.
  """
  # At first use: the folder of the kernels looks rows up with ops/table_lookup.py itself.
  reduce_rows = dispatch.load("deepseek_jax.ops.sparse_attention.reduce_rows")
  rows, width = acc_NF.shape
  piece = math.gcd(width, _PIECE)
  pieces = width // piece
  piece_Ck = place_C[:, None] * pieces + jnp.arange(pieces, dtype=jnp.int32)
  piece_Ck = jnp.where(place_C[:, None] < 0, -1, piece_Ck)
  inverse = reduce_rows.invert(piece_Ck, rows * pieces, chunk=len(place_C), keys_per_query=pieces)
  inverse = jax.tree.map(lambda x: x[0], inverse)  # of the only chunk
  total_Nw = reduce_rows.add_by_entry(
    inverse, rows_CF.reshape(-1, piece), acc_NF.reshape(-1, piece)
  )
  return total_Nw.reshape(rows, width)


_IMPLEMENTATIONS = {"reference": _scatter, "pallas_triton": _sum_sorted}
