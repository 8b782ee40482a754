"""RMSNorm with float32 statistics."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, gain: jax.Array, *, eps: float) -> jax.Array:
  """Scales each row to unit root-mean-square: y = x rsqrt(mean(x^2) + eps) gain.

  Args:
    x: [..., D], any float dtype.
    gain: [D], applied in float32.
    eps: added to the mean square; the release uses 1e-20 (an all-zero row gives 0, not NaN).

  Returns: [..., D] in x.dtype.
  """
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * scale * gain.astype(jnp.float32)).astype(x.dtype)
