"""Sinkhorn normalization of the stream-mixing matrix.

Legend: X leading axes, c streams; the matrix is indexed [old stream, new stream].
"""

import jax

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.sinkhorn import reference

_IMPLEMENTATIONS = {
  "reference": reference.sinkhorn,
  "pallas_triton": dispatch.on_demand(f"{__name__}.pallas_triton", "sinkhorn"),
}


def sinkhorn(
  logits_Xcc: jax.Array, iterations: int, eps: float, *, implementation: str | None = None
) -> jax.Array:
  """Nearly doubly stochastic matrix from logits.

  C = softmax over new streams + eps; C /= column sums + eps; then iterations - 1 times rows and
  columns in turn, so that it ends with columns. "Columns" sum over old streams.

  Args:
    logits_Xcc: [..., c, c] float32.
    iterations: number of row (and of column) normalizations, the softmax counted as the first.
    eps: added to every sum and after the softmax.
    implementation: "pallas_triton" (GPUs, one kernel for all iterations) or "reference"; None
      picks.

  Returns: [..., c, c] float32. Source: model.md section 2.2.
  """
  return dispatch.call(_IMPLEMENTATIONS, implementation, logits_Xcc, iterations, eps)
