"""Cross-entropy of a linear output layer. Legend: X tokens, D width, V vocabulary."""

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.cross_entropy import reference, tokamax_tpu, xla

_IMPLEMENTATIONS = {
  "reference": reference.token_nll,
  "xla": xla.token_nll,
  "tokamax": tokamax_tpu.token_nll,
}


def linear_token_nll(
  hidden_XD: jax.Array,
  head_VD: jax.Array,
  targets_X: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
  implementation: str | None = None,
) -> jax.Array:
  """Negative log-likelihood of each target token, in nats.

  nll_x = log sum_v exp(hidden_x . head_v) - hidden_x . head_{target_x}

  Args:
    hidden_XD: any float dtype.
    head_VD: output embedding, any float dtype.
    targets_X: int32 in [0, V).
    chunk_tokens: tokens whose logits exist at a time, in the backward pass too, which computes
      them again.
    compute_dtype: of the matmul operands; products add up in float32 and statistics are float32.
    implementation: "xla", "reference", which holds all logits, or "tokamax", a TPU kernel on one
      device that is never picked by itself; None picks.

  Returns: float32 [X]. Gradients come in the dtypes of hidden_XD and head_VD; that of the head adds
    up in float32 over the chunks.
  """
  return dispatch.call(
    _IMPLEMENTATIONS,
    implementation,
    hidden_XD,
    head_VD,
    targets_X,
    chunk_tokens=chunk_tokens,
    compute_dtype=compute_dtype,
  )


def linear_cross_entropy(
  hidden_XD: jax.Array,
  head_VD: jax.Array,
  targets_X: jax.Array,
  weights_X: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
  implementation: str | None = None,
) -> jax.Array:
  """Weighted sum of linear_token_nll over the tokens: float32 [], in nats.

  Args:
    weights_X: float32; 0 takes a token out, whatever its finite hidden state.
    (the others as in linear_token_nll)
  """
  nll_X = linear_token_nll(
    hidden_XD,
    head_VD,
    targets_X,
    chunk_tokens=chunk_tokens,
    compute_dtype=compute_dtype,
    implementation=implementation,
  )
  return jnp.sum(weights_X * nll_X)
