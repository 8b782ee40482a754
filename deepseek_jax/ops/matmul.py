"""Products of low-precision operands, and of such an operand with a float32 matrix.

Every product adds up in float32 and is rounded once. In the specifications p counts pieces.
"""

import functools

import jax
import jax.numpy as jnp


def einsum_f32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """einsum(spec, x, y) as float32: exact products of the operands, float32 accumulation."""
  return _einsum(spec, x, y, jnp.float32)


def _einsum(spec: str, x: jax.Array, y: jax.Array, dtype) -> jax.Array:
  narrow = lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=dtype)
  if x.dtype == y.dtype == jnp.float32:
    return narrow(x, y)
  # XLA's CPU backend has no bfloat16 product with a float32 result; widening is exact.
  wide = lambda x, y: jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32)).astype(dtype)
  return jax.lax.platform_dependent(x, y, cpu=wide, default=narrow)


def dot(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
  """einsum(spec, x, weight) in x.dtype, the weight rounded to it first.

  Args:
    spec: two operands; every axis of one is in the other or in the result.
    x: any float dtype.
    weight: float32 master.

  The gradient of x has its dtype, that of the weight is float32 and was never less. Left to
  automatic differentiation, both products of a bfloat16 backward pass would be of float32 operands.
  """
  if x.dtype == jnp.float32:
    return einsum_f32(spec, x, weight)
  return _dot(spec, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(spec, x, weight):
  return _einsum(spec, x, weight.astype(x.dtype), x.dtype)


def _dot_backward(spec, saved, d_out):
  (x, weight), (of_x, of_weight, of_out) = saved, _operands(spec)
  d_x = _einsum(f"{of_out},{of_weight}->{of_x}", d_out, weight.astype(x.dtype), x.dtype)
  return d_x, einsum_f32(f"{of_x},{of_out}->{of_weight}", x, d_out).astype(weight.dtype)


_dot.defvjp(lambda spec, x, weight: (_dot(spec, x, weight), (x, weight)), _dot_backward)


def exact_dot(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
  """einsum(spec, x, weight) with all 24 bits of the weight: float32.

  A bfloat16 x is multiplied with three bfloat16 pieces of the weight, whose sum is the weight: the
  products are exact, and x is never written out as float32. The gradient of the weight is as exact;
  that of x drops what its own rounding hides. Arguments are those of `dot`.
  """
  if x.dtype == jnp.float32:
    return jnp.einsum(spec, x, weight, precision=jax.lax.Precision.HIGHEST)
  return _exact_dot(spec, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exact_dot(spec, x, weight):
  of_x, of_weight, of_out = _operands(spec)
  pieces = einsum_f32(f"{of_x},p{of_weight}->p{of_out}", x, _pieces(weight, x.dtype))
  return jnp.sum(pieces, axis=0)


def _exact_dot_backward(spec, saved, d_out):
  (x, weight), (of_x, of_weight, of_out) = saved, _operands(spec)
  d_pieces, w_pieces = _pieces(d_out, x.dtype), _pieces(weight, x.dtype)
  # First times first, first times second, second times first.
  left, right = d_pieces[jnp.array((0, 0, 1))], w_pieces[jnp.array((0, 1, 0))]
  d_x = _einsum(f"p{of_out},p{of_weight}->{of_x}", left, right, x.dtype)
  d_weight = einsum_f32(f"p{of_out},{of_x}->p{of_weight}", d_pieces, x)
  return d_x, jnp.sum(d_weight, axis=0)


_exact_dot.defvjp(
  lambda spec, x, weight: (_exact_dot(spec, x, weight), (x, weight)), _exact_dot_backward
)


def _operands(spec: str) -> tuple[str, str, str]:
  operands, of_out = spec.split("->")
  of_x, of_weight = operands.split(",")
  return of_x, of_weight, of_out


def _pieces(x: jax.Array, dtype) -> jax.Array:
  """[3, ...] of `dtype` that add up to float32 x; no bit is lost between float32 and bfloat16."""
  pieces, rest = [], x
  for _ in range(3):
    # A cast there and back would be dropped by XLA, and the rest be 0.
    piece = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    pieces.append(piece.astype(dtype))
    rest = rest - piece
  return jnp.stack(pieces)
