"""Logits of the whole vocabulary for a piece of the tokens at a time, on each device its own slots.

Legend: B rows, T slots, C slots of a piece, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence

import jax

from deepseek_jax.by_slots import by_slots
from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.matmul import einsum_f32


def over_logits(
  body: Callable,
  hiddens_BTD: Sequence[jax.Array],
  targets_BT: jax.Array,
  head_VD: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
):
  """Calls body(logits of each hidden state, targets) for pieces of slots and joins the results.

  Args:
    body: sequence of float32 [B, C, V], int32 [B, C] -> a tree of arrays [B, C].
    hiddens_BTD: any float dtype.
    targets_BT: int32 in [0, V).
    head_VD: output embedding of all of them, any float dtype.
    chunk_tokens: tokens of a device whose logits exist at a time.
    compute_dtype: of the matmul operands; products add up in float32.
  """

  def own(place, slots, rows, pieces, weights):
    del place, rows, pieces
    head = weights[0].astype(compute_dtype)

    def piece(start, hiddens_and_targets):
      del start
      *hiddens_BCD, targets_BC = hiddens_and_targets
      logits = lambda h_BCD: einsum_f32("bcd,vd->bcv", h_BCD.astype(head.dtype), head)
      return body([logits(hidden_BCD) for hidden_BCD in hiddens_BCD], targets_BC)

    return over_queries(piece, slots, max(1, chunk_tokens // len(slots[-1])))

  head = (head_VD, ("vocab", "embed"))
  return by_slots(own, (*hiddens_BTD, targets_BT), weights=[head], dtype=compute_dtype)
