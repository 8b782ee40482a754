"""What a model thinks of tokens that are given: their log-probabilities, and which it would choose.

Legend: B rows, T slots, C slots of a chunk, D width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.layout import Array
from deepseek_jax.ops.token_logits import over_logits


class TokenScores(NamedTuple):
  log_p_BT: Array  # float32, nats
  is_top_BT: Array  # bool, no other token is likelier (of equals the lowest id counts)


def token_scores(
  hidden_BTD: jax.Array,
  head_VD: jax.Array,
  targets_BT: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
) -> TokenScores:
  """log p[target] and argmax p == target, with p = softmax(head hidden).

  Args:
    hidden_BTD: any float dtype.
    head_VD: output embedding, any float dtype.
    targets_BT: int32 in [0, V).
    chunk_tokens: tokens of a device whose logits exist at a time.
    compute_dtype: of the matmul operands; products add up in float32 and statistics are float32.
  """

  def of_piece(logits, targets_BC):
    (logits_BCV,) = logits
    log_p_BCV = jax.nn.log_softmax(logits_BCV, axis=-1)
    log_p_BC = jnp.take_along_axis(log_p_BCV, targets_BC[..., None], axis=-1)[..., 0]
    return TokenScores(log_p_BC, jnp.argmax(logits_BCV, axis=-1) == targets_BC)

  return over_logits(
    of_piece,
    [hidden_BTD],
    targets_BT,
    head_VD,
    chunk_tokens=chunk_tokens,
    compute_dtype=compute_dtype,
  )
