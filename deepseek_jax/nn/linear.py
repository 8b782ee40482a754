"""What surrounds a linear layer: float32 products, and activation quantization as a switch."""

import jax
import jax.numpy as jnp

from deepseek_jax.config import NumericsConfig
from deepseek_jax.ops.quantize import fake_fp8


def exact_dot(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
  """einsum(spec, x, weight) in float32 throughout, for the places where the release insists."""
  return jnp.einsum(spec, x.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)


def fp8_input(x: jax.Array, numerics: NumericsConfig) -> jax.Array:
  """What a linear that the release stores in FP8 or FP4 sees of x (model.md section 2.7)."""
  return fake_fp8(x) if numerics.activations_fp8 else x
