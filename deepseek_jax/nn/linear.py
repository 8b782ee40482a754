"""What a linear layer sees of its input, and an expert of its weights: quantization as a switch."""

import jax

from deepseek_jax.config import NumericsConfig
from deepseek_jax.ops.quantize import fake_expert, fake_fp8


def fp8_input(x: jax.Array, numerics: NumericsConfig) -> jax.Array:
  """What a linear that the release stores in FP8 or FP4 sees of x (model.md section 2.7)."""
  return fake_fp8(x) if numerics.activations_fp8 else x


def fp4_expert(w_EIO: jax.Array, numerics: NumericsConfig) -> jax.Array:
  """What a routed expert, which the release stores in FP4, computes with (model.md section 3.6)."""
  return fake_expert(w_EIO) if numerics.experts_fp4 else w_EIO
