"""Single-pass manifold-constrained hyper-connections: how streams are read and written.

Legend: X leading axes (rows, slots), c streams, D width, M = 2c + c*c mixing coefficients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops.sinkhorn import sinkhorn

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
  iterations: int,
) -> Mixing:
  """Predicts a site's coefficients from all streams at once.

  mix = (fn . f) rsqrt(mean(f^2) + norm_eps) with f the flattened streams; pre = sigmoid + hc_eps,
  post = 2 sigmoid, comb = Sinkhorn. Everything is float32. Source: model.md section 2.2.
  """
  c = streams_XcD.shape[-2]
  flat = streams_XcD.astype(jnp.float32)
  inverse_rms = jax.lax.rsqrt(jnp.mean(flat * flat, axis=(-2, -1)) + norm_eps)
  mix = jnp.einsum("...cd,mcd->...m", flat, fn_McD, precision=_EXACT) * inverse_rms[..., None]
  pre, post, comb = jnp.split(mix, [c, 2 * c], axis=-1)
  base_pre, base_post, base_comb = jnp.split(base_M, [c, 2 * c])
  logits = (comb * scale_3[2] + base_comb).reshape(*comb.shape[:-1], c, c)
  return Mixing(
    jax.nn.sigmoid(pre * scale_3[0] + base_pre) + hc_eps,
    2 * jax.nn.sigmoid(post * scale_3[1] + base_post),
    sinkhorn(logits, iterations, hc_eps),
  )


def collapse(streams_XcD: jax.Array, pre_Xc: jax.Array) -> jax.Array:
  """sum_c pre[c] X[c], float32 sum -> [X, D] in the streams' dtype."""
  total = jnp.einsum("...cd,...c->...d", streams_XcD.astype(jnp.float32), pre_Xc, precision=_EXACT)
  return total.astype(streams_XcD.dtype)


def expand(
  y_XD: jax.Array, streams_XcD: jax.Array, post_Xc: jax.Array, comb_Xcc: jax.Array
) -> jax.Array:
  """New stream k: post[k] y + sum_j comb[j, k] X[j], float32 sum -> [X, c, D] in streams' dtype."""
  mixed = jnp.einsum(
    "...jk,...jd->...kd", comb_Xcc, streams_XcD.astype(jnp.float32), precision=_EXACT
  )
  written = post_Xc[..., None] * y_XD.astype(jnp.float32)[..., None, :]
  return (mixed + written).astype(streams_XcD.dtype)
