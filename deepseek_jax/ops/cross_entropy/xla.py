"""Negative log-likelihood with the logits of one chunk of tokens at a time, in both directions.

Legend: X tokens, n chunks, C tokens of a chunk, D width, V vocabulary.
"""

import functools

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
  return _token_nll(hidden_XD, head_VD, targets_X, chunk_tokens, jnp.dtype(compute_dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_nll(hidden_XD, head_VD, targets_X, chunk_tokens, compute_dtype):
  return _forward(hidden_XD, head_VD, targets_X, chunk_tokens, compute_dtype)[0]


def _forward(hidden_XD, head_VD, targets_X, chunk_tokens, compute_dtype):
  """nll = log sum_v exp(logit_v) - logit_target; keeps log sum exp, not the logits."""
  head = head_VD.astype(compute_dtype)

  def chunk(_, piece):
    hidden_CD, targets_C = piece
    logits_CV = _logits(hidden_CD, head)
    log_z_C = jax.nn.logsumexp(logits_CV, axis=-1)
    # A masked sum and no gather: it fuses, and it works on a vocabulary that is split over devices.
    chosen_C = jnp.sum(jnp.where(_is_target(targets_C, logits_CV), logits_CV, 0.0), axis=-1)
    return None, (log_z_C - chosen_C, log_z_C)

  pieces = _split((hidden_XD.astype(compute_dtype), targets_X), chunk_tokens)
  _, outputs = _over_chunks(chunk, None, pieces)
  nll_X, log_z_X = _join(outputs, len(targets_X))
  return nll_X, (hidden_XD, head_VD, targets_X, log_z_X)


def _backward(chunk_tokens, compute_dtype, residuals, d_nll_X):
  """d_logits = d_nll (softmax(logits) - onehot(target)); the logits are computed again."""
  hidden_XD, head_VD, targets_X, log_z_X = residuals
  head = head_VD.astype(compute_dtype)

  def chunk(d_head_VD, piece):
    hidden_CD, targets_C, log_z_C, d_nll_C = piece
    logits_CV = _logits(hidden_CD, head)
    softmax_CV = jnp.exp(logits_CV - log_z_C[:, None])
    d_logits_CV = (softmax_CV - _is_target(targets_C, logits_CV)) * d_nll_C[:, None]
    d_logits_CV = d_logits_CV.astype(compute_dtype)
    d_head_VD += einsum_f32("cv,cd->vd", d_logits_CV, hidden_CD)
    return d_head_VD, einsum_f32("cv,vd->cd", d_logits_CV, head)

  pieces = (hidden_XD.astype(compute_dtype), targets_X, log_z_X, d_nll_X)
  zeros_VD = jnp.zeros(head_VD.shape, jnp.float32)
  d_head_VD, d_hidden = _over_chunks(chunk, zeros_VD, _split(pieces, chunk_tokens))
  d_hidden_XD = _join(d_hidden, len(targets_X))
  return d_hidden_XD.astype(hidden_XD.dtype), d_head_VD.astype(head_VD.dtype), None


_token_nll.defvjp(_forward, _backward)


def _logits(hidden_CD: jax.Array, head_VD: jax.Array) -> jax.Array:
  return einsum_f32("cd,vd->cv", hidden_CD, head_VD)


def _is_target(targets_C: jax.Array, logits_CV: jax.Array) -> jax.Array:
  return jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1) == targets_C[:, None]


def _split(arrays, chunk_tokens: int):
  """[X, ...] -> [n, C, ...]. Tokens that fill up the last chunk are zeros: their results are cut
  off and their d_nll is 0.
  """

  def split(x):
    count = -(-len(x) // chunk_tokens)
    size = -(-len(x) // count)
    x = jnp.pad(x, [(0, count * size - len(x))] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, size, *x.shape[1:])

  return jax.tree.map(split, arrays)


def _join(arrays, tokens: int):
  """The inverse of _split."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], arrays)


def _over_chunks(body, carry, pieces):
  """A scan; without the loop when there is one chunk, which XLA then fuses with its neighbours."""
  if len(jax.tree.leaves(pieces)[0]) > 1:
    return jax.lax.scan(body, carry, pieces)
  carry, output = body(carry, jax.tree.map(lambda x: x[0], pieces))
  return carry, jax.tree.map(lambda x: x[None], output)
