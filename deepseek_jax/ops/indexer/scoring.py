"""The arithmetic of indexer scores inside kernels, the same on every device.

Legend: X, Y rows of a tile, i indexer width.
"""

import jax
import jax.numpy as jnp


def rounding(scores_bf16: bool):
  """What happens after the product, the weight and the sum: nothing, or rounding to bfloat16."""
  return _round_bf16 if scores_bf16 else lambda x: x


def head_term(x_Xi, y_Yi, weight, rounded) -> jax.Array:
  """[X, Y] float32 w relu(x . y), of one head; float32 operands are not cut to TF32 or bfloat16.

  Args:
    weight: float32, spreads over [X, Y].
    rounded: from `rounding`.
  """
  exact = jax.lax.Precision.HIGHEST if x_Xi.dtype == jnp.float32 else None
  product_XY = jax.lax.dot_general(
    x_Xi, y_Yi, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
  )
  return rounded(jnp.maximum(rounded(product_XY), 0.0) * weight)


def _round_bf16(x):
  """float32 -> nearest bfloat16, ties to even, as float32: no cast that a compiler may drop."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
