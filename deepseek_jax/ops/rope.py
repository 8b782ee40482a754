"""Rotary position embedding of the last channels, with YaRN frequencies where the config says so.

Legend: d channels, R rotated channels (the last ones), pairs are adjacent channels (2p, 2p+1).
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.config import RopeConfig


def frequencies(cfg: RopeConfig, rope_dim: int, *, compressed: bool) -> np.ndarray:
  """[R/2] float32 angle per position of each pair.

  Layers without compressed entries: theta^(-2p/R). Layers with them: the same with
  compress_theta, divided by yarn_factor where the wavelength is long, for every sequence length
  and without an amplitude factor. Source: model.md section 2.3.
  """
  theta = cfg.compress_theta if compressed else cfg.theta
  pairs = np.arange(rope_dim // 2)
  base = theta ** (-2.0 * pairs / rope_dim)
  if not compressed:
    return base.astype(np.float32)

  def corrected_pair(rotations: float) -> float:
    turns = cfg.yarn_original_length / (2 * math.pi * rotations)
    return rope_dim * math.log(turns) / (2 * math.log(theta))

  low = max(math.floor(corrected_pair(cfg.yarn_beta_fast)), 0)
  high = min(math.ceil(corrected_pair(cfg.yarn_beta_slow)), rope_dim - 1)
  ramp = np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)
  return (base / cfg.yarn_factor * ramp + base * (1 - ramp)).astype(np.float32)


def rotate(
  x: jax.Array, positions: jax.Array, frequency: np.ndarray, *, inverse: bool = False
) -> jax.Array:
  """Turns each adjacent pair (a, b) of the last R channels to (a + ib) exp(+-i position f_p).

  Args:
    x: [..., d] with any axes between the positions' axes and d.
    positions: int32, the leading axes of x.
    frequency: [R/2] from `frequencies`.
    inverse: turns back, as after attention.

  Returns: like x. Angles and products are float32.
  """
  return _rotate(-1.0 if inverse else 1.0, tuple(frequency.tolist()), x, positions)


# The frequencies are a tuple because jax.custom_vjp wants to hash what it does not differentiate.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rotate(direction: float, frequency: tuple[float, ...], x, positions):
  rope_dim = 2 * len(frequency)
  angle = positions.astype(jnp.float32)[..., None] * np.array(frequency, np.float32)
  angle = angle.reshape(positions.shape + (1,) * (x.ndim - positions.ndim - 1) + angle.shape[-1:])
  # Each angle twice, so that the rotation is x cos + (-b, a) sin without taking pairs apart.
  cos = jnp.repeat(jnp.cos(angle), 2, axis=-1)
  sin = jnp.repeat(jnp.sin(angle) * direction, 2, axis=-1)
  turned = x[..., -rope_dim:].astype(jnp.float32)
  pairs = turned.reshape(*turned.shape[:-1], rope_dim // 2, 2)
  quarter = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(turned.shape)
  turned = turned * cos + quarter * sin
  # Written into x, in place where nothing else needs it: most channels are not turned. Computed in
  # the same kernel the new channels would read what they overwrite, and x be copied first.
  turned = jax.lax.optimization_barrier(turned.astype(x.dtype))
  return jax.lax.dynamic_update_slice_in_dim(x, turned, x.shape[-1] - rope_dim, axis=-1)


# The transpose of a rotation turns back, and costs no more than the rotation.
_rotate.defvjp(
  lambda direction, frequency, x, positions: (
    _rotate(direction, frequency, x, positions),
    positions,
  ),
  lambda direction, frequency, positions, d: (_rotate(-direction, frequency, d, positions), None),
)
