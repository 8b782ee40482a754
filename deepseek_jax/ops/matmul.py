"""Products of low-precision operands with a float32 result."""

import jax
import jax.numpy as jnp


def einsum_f32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """einsum(spec, x, y) as float32: exact products of the operands, float32 accumulation."""
  narrow = lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
  if x.dtype == y.dtype == jnp.float32:
    return narrow(x, y)
  # XLA's CPU backend has no bfloat16 product with a float32 result; widening is exact.
  wide = lambda x, y: jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32))
  return jax.lax.platform_dependent(x, y, cpu=wide, default=narrow)
