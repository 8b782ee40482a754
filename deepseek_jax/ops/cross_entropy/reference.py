"""Negative log-likelihood of target tokens, readable form.

Legend: X tokens, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from deepseek_jax.ops.matmul import einsum_f32


def token_nll(
  hidden_XD: jax.Array,
  head_VD: jax.Array,
  targets_X: jax.Array,
  *,
  chunk_tokens: int,
  compute_dtype: jax.typing.DTypeLike,
) -> jax.Array:
  del chunk_tokens  # all logits at once
  logits_XV = einsum_f32(
    "xd,vd->xv", hidden_XD.astype(compute_dtype), head_VD.astype(compute_dtype)
  )
  chosen_X = jnp.take_along_axis(logits_XV, targets_X[:, None], axis=-1)[:, 0]
  return jax.nn.logsumexp(logits_XV, axis=-1) - chosen_X
