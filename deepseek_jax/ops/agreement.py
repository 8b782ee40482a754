"""How far two hidden states of the same token agree on the next one, over the whole vocabulary.

Legend: B rows, T slots, C slots of a chunk, D width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops.token_logits import over_logits


class Agreement(NamedTuple):
  """Of each token; p is the distribution that is held to be right, q the other."""

  p_nll_BT: jax.Array  # float32, nats of the target
  q_nll_BT: jax.Array
  kl_BT: jax.Array  # float32, KL(p || q) in nats
  same_top_BT: jax.Array  # float32, 1 where both have the same likeliest token, else 0


def token_agreement(
  p_hidden_BTD: jax.Array,
  q_hidden_BTD: jax.Array,
  head_VD: jax.Array,
  targets_BT: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
) -> Agreement:
  """Compares p = softmax(head p_hidden) with q = softmax(head q_hidden).

  Args:
    p_hidden_BTD: any float dtype.
    q_hidden_BTD: likewise.
    head_VD: output embedding of both, any float dtype.
    targets_BT: int32 in [0, V).
    chunk_tokens: tokens of a device whose logits exist at a time.
    compute_dtype: of the matmul operands; products add up in float32 and statistics are float32.
  """

  def of_piece(logits, targets_BC):
    log_p_BCV, log_q_BCV = (jax.nn.log_softmax(logits_BCV, axis=-1) for logits_BCV in logits)
    nll = lambda log_BCV: -jnp.take_along_axis(log_BCV, targets_BC[..., None], axis=-1)[..., 0]
    top = lambda log_BCV: jnp.argmax(log_BCV, axis=-1)
    kl_BC = jnp.sum(jnp.exp(log_p_BCV) * (log_p_BCV - log_q_BCV), axis=-1)
    same_BC = (top(log_p_BCV) == top(log_q_BCV)).astype(jnp.float32)
    return Agreement(nll(log_p_BCV), nll(log_q_BCV), kl_BC, same_BC)

  return over_logits(
    of_piece,
    [p_hidden_BTD, q_hidden_BTD],
    targets_BT,
    head_VD,
    chunk_tokens=chunk_tokens,
    compute_dtype=compute_dtype,
  )
