"""Products of low-precision operands, and of such an operand with a float32 matrix.

Every product adds up in float32 and is rounded once.
Legend: X leading axes, K contracted channels, M columns, p pieces.
"""

import functools

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


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
  x, weight = saved
  (of_x, of_weight), of_out = spec.split("->")[0].split(","), spec.split("->")[1]
  d_x = _einsum(f"{of_out},{of_weight}->{of_x}", d_out, weight.astype(x.dtype), x.dtype)
  return d_x, einsum_f32(f"{of_x},{of_out}->{of_weight}", x, d_out).astype(weight.dtype)


_dot.defvjp(lambda spec, x, weight: (_dot(spec, x, weight), (x, weight)), _dot_backward)


def dot_f32(x_XK: jax.Array, weight_MK: jax.Array) -> jax.Array:
  """x . weight with the weight's 24 bits: float32 [X, M].

  A bfloat16 x is multiplied with three bfloat16 pieces of the weight, whose sum is the weight: the
  products are exact, and x is never written out as float32. The gradient of the weight is as exact;
  that of x drops what its own rounding hides.
  """
  if x_XK.dtype == jnp.float32:
    return jnp.einsum("...k,mk->...m", x_XK, weight_MK, precision=_EXACT)
  return _dot_f32(x_XK, weight_MK)


@jax.custom_vjp
def _dot_f32(x_XK, weight_MK):
  return jnp.sum(einsum_f32("...k,pmk->...pm", x_XK, _pieces(weight_MK, x_XK.dtype)), axis=-2)


def _dot_f32_backward(saved, d_XM):
  x_XK, weight_MK = saved
  dtype = x_XK.dtype
  d_pXM, weight_pMK = _pieces(d_XM, dtype), _pieces(weight_MK, dtype)
  pairs = (0, 0, 1), (0, 1, 0)  # first times first, first times second, second times first
  left_pXM, right_pMK = d_pXM[jnp.array(pairs[0])], weight_pMK[jnp.array(pairs[1])]
  d_x_XK = _einsum("p...m,pmk->...k", left_pXM, right_pMK, dtype)
  d_weight_pMK = einsum_f32("p...m,...k->pmk", d_pXM, x_XK)
  return d_x_XK, jnp.sum(d_weight_pMK, axis=0)


_dot_f32.defvjp(lambda x, weight: (_dot_f32(x, weight), (x, weight)), _dot_f32_backward)


def _pieces(x: jax.Array, dtype) -> jax.Array:
  """[3, ...] of `dtype` that add up to float32 x; no bit is lost between float32 and bfloat16."""
  pieces, rest = [], x
  for _ in range(3):
    # A cast there and back would be dropped by XLA, and the rest be 0.
    piece = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    pieces.append(piece.astype(dtype))
    rest = rest - piece
  return jnp.stack(pieces)
