"""What a linear layer sees of its input: activation quantization as a switch."""

import jax

from deepseek_jax.config import NumericsConfig
from deepseek_jax.ops.quantize import fake_fp8


def fp8_input(x: jax.Array, numerics: NumericsConfig) -> jax.Array:
  """What a linear that the release stores in FP8 or FP4 sees of x (model.md section 2.7)."""
  return fake_fp8(x) if numerics.activations_fp8 else x
