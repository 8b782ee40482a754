"""Single-pass manifold-constrained hyper-connections: how streams are read and written.

Legend: X leading axes (rows, slots), c streams, D width, M = 2c + c*c mixing coefficients.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops.matmul import exact_dot

_EXACT = jax.lax.Precision.HIGHEST


class Mixing(NamedTuple):
  """Coefficients of one site, float32. `pre` is used one site later."""

  pre_Xc: jax.Array
  post_Xc: jax.Array
  comb_Xcc: jax.Array  # [old stream, new stream]


def mixing(
  streams_XcD: jax.Array,
  fn_McD: jax.Array,
  base_M: jax.Array,
  scale_3: jax.Array,
  *,
  norm_eps: float,
  hc_eps: float,
  normalize: Callable[[jax.Array], jax.Array],
) -> Mixing:
  """Predicts a site's coefficients from all streams at once.

  mix = (fn . f) rsqrt(mean(f^2) + norm_eps) with f the flattened streams; pre = sigmoid + hc_eps,
  post = 2 sigmoid, comb = normalize(logits), which is Sinkhorn's. Everything is float32. Source:
  model.md section 2.2.
  """
  c = streams_XcD.shape[-2]
  flat = streams_XcD.astype(jnp.float32)
  inverse_rms = jax.lax.rsqrt(jnp.mean(flat * flat, axis=(-2, -1)) + norm_eps)
  mix = exact_dot("...cd,mcd->...m", streams_XcD, fn_McD) * inverse_rms[..., None]
  pre, post, comb = jnp.split(mix, [c, 2 * c], axis=-1)
  base_pre, base_post, base_comb = jnp.split(base_M, [c, 2 * c])
  logits = (comb * scale_3[2] + base_comb).reshape(*comb.shape[:-1], c, c)
  return Mixing(
    jax.nn.sigmoid(pre * scale_3[0] + base_pre) + hc_eps,
    2 * jax.nn.sigmoid(post * scale_3[1] + base_post),
    normalize(logits),
  )


def collapse(streams_XcD: jax.Array, pre_Xc: jax.Array) -> jax.Array:
  """sum_c pre[c] X[c], float32 sum -> [X, D] in the streams' dtype."""
  total = jnp.einsum("...cd,...c->...d", streams_XcD.astype(jnp.float32), pre_Xc, precision=_EXACT)
  return total.astype(streams_XcD.dtype)


@jax.custom_vjp
def expand(
  y_XD: jax.Array, streams_XcD: jax.Array, post_Xc: jax.Array, comb_Xcc: jax.Array
) -> jax.Array:
  """New stream k: post[k] y + sum_j comb[j, k] X[j], float32 sum -> [X, c, D] in streams' dtype."""
  written = post_Xc[..., None] * y_XD.astype(jnp.float32)[..., None, :]
  return (written + _mix(comb_Xcc, streams_XcD)).astype(streams_XcD.dtype)


def _mix(weights_Xjk: jax.Array, streams_XjD: jax.Array) -> jax.Array:
  """sum_j weights[j, k] X[j] in float32, multiplied out: 4 x 4 is too small for a matmul."""
  terms = (
    weights_Xjk[..., j, :, None] * streams_XjD[..., j, None, :].astype(jnp.float32)
    for j in range(streams_XjD.shape[-2])
  )
  return functools.reduce(jnp.add, terms)


def _expand_backward(saved, d_XcD):
  y_XD, streams_XcD, post_Xc, comb_Xcc = saved
  d32_XcD = d_XcD.astype(jnp.float32)
  d_y = jnp.sum(post_Xc[..., None] * d32_XcD, axis=-2)
  d_streams = _mix(jnp.swapaxes(comb_Xcc, -1, -2), d32_XcD)
  # Sums of products, not matrix products: one pass over the streams gives all of them.
  d_post = jnp.sum(y_XD.astype(jnp.float32)[..., None, :] * d32_XcD, axis=-1)
  old_Xc1D = streams_XcD.astype(jnp.float32)[..., :, None, :]
  d_comb = jnp.sum(old_Xc1D * d32_XcD[..., None, :, :], axis=-1)
  return d_y.astype(y_XD.dtype), d_streams.astype(streams_XcD.dtype), d_post, d_comb


expand.defvjp(lambda *arguments: (expand(*arguments), arguments), _expand_backward)
