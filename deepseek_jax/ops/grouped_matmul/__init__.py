"""Matrix products of rows with their group's matrix.

Legend: P rows, G groups, K input width, N output width.
"""

import jax

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.grouped_matmul import blocked, ragged

_IMPLEMENTATIONS = {"reference": blocked.grouped_matmul, "pallas_tpu": ragged.grouped_matmul}


def grouped_matmul(
  x_PK: jax.Array,
  w_GKN: jax.Array,
  group_rows_G: jax.Array,
  *,
  block_rows: int,
  implementation: str | None = None,
) -> jax.Array:
  """Row p times the matrix of the group it lies in.

  Args:
    x_PK: groups one after the other; rows past the last group must be zero.
    w_GKN: one matrix per group, x's dtype.
    group_rows_G: int32, multiples of block_rows.
    block_rows: no block of this many rows spans two groups.

  Returns: [P, N] in x's dtype, float32 accumulation.
  """
  return dispatch.call(
    _IMPLEMENTATIONS, implementation, x_PK, w_GKN, group_rows_G, block_rows=block_rows
  )
