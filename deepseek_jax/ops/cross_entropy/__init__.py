"""Cross-entropy of a linear output layer.

Legend: B rows, T slots, X = B T tokens, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from deepseek_jax.by_slots import by_slots
from deepseek_jax.ops import dispatch
from deepseek_jax.ops.cross_entropy import reference, tokamax_tpu, xla

_IMPLEMENTATIONS = {
  "reference": reference.token_nll,
  "xla": xla.token_nll,
  "tokamax": tokamax_tpu.token_nll,
}


def linear_token_nll(
  hidden_BTD: jax.Array,
  head_VD: jax.Array,
  targets_BT: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
  implementation: str | None = None,
) -> jax.Array:
  """Negative log-likelihood of each target token, in nats.

  nll = log sum_v exp(hidden . head_v) - hidden . head_target

  Args:
    hidden_BTD: any float dtype.
    head_VD: output embedding, any float dtype.
    targets_BT: int32 in [0, V).
    chunk_tokens: tokens of a device whose logits exist at a time, in the backward pass too, which
      computes them again.
    compute_dtype: of the matmul operands; products add up in float32 and statistics are float32.
    implementation: "xla", "reference", which holds all logits, or "tokamax", a TPU kernel on one
      device that is never picked by itself; None picks.

  Returns: float32 [B, T]. Gradients come in the dtypes of hidden_BTD and head_VD; that of the head
    adds up in float32 over chunks and devices.
  """

  def own(place, slots, rows, pieces, weights):
    del place, rows, pieces
    hidden_BTD, targets_BT = slots
    nll_X = dispatch.call(
      _IMPLEMENTATIONS,
      implementation,
      hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
      *weights,
      targets_BT.reshape(-1),
      chunk_tokens=chunk_tokens,
      compute_dtype=compute_dtype,
    )
    return nll_X.reshape(targets_BT.shape)

  head = (head_VD, ("vocab", "embed"))
  return by_slots(own, (hidden_BTD, targets_BT), weights=[head], dtype=compute_dtype)


def linear_cross_entropy(
  hidden_BTD: jax.Array,
  head_VD: jax.Array,
  targets_BT: jax.Array,
  weights_BT: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
  implementation: str | None = None,
) -> jax.Array:
  """Weighted sum of linear_token_nll over the tokens: float32 [], in nats.

  Args:
    weights_BT: float32; 0 takes a token out, whatever its finite hidden state.
    (the others as in linear_token_nll)
  """
  nll_BT = linear_token_nll(
    hidden_BTD,
    head_VD,
    targets_BT,
    chunk_tokens=chunk_tokens,
    compute_dtype=compute_dtype,
    implementation=implementation,
  )
  return jnp.sum(weights_BT * nll_BT)
