"""Matrix products of rows with their group's matrix.

Legend: P rows, G groups, K input width, N output width.
"""

import jax

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.grouped_matmul import ragged_dot, reference, xla

_IMPLEMENTATIONS = {
  "reference": reference.grouped_matmul,
  "xla": xla.grouped_matmul,
  "pallas_gpu": dispatch.on_demand(f"{__name__}.pallas_gpu", "grouped_matmul"),
  "ragged_dot": ragged_dot.grouped_matmul,
}


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
    block_rows: no block of this many rows spans two groups; "pallas_gpu" takes multiples of 64.
    implementation: "pallas_gpu" (Hopper), "ragged_dot" (TPU), "xla", which holds few copies of
      matrices, or "reference" with a copy for every block; None picks.

  Returns: [P, N] in x's dtype, float32 accumulation; zero past the last group. The gradient of w
    adds up in float32 over a group's rows and comes in w's dtype.
  """
  if x_PK.shape[0] % block_rows:
    raise ValueError(
      f"x has {x_PK.shape[0]} rows, accepted are multiples of block_rows, {block_rows}."
    )
  return dispatch.call(
    _IMPLEMENTATIONS, implementation, x_PK, w_GKN, group_rows_G, block_rows=block_rows
  )
