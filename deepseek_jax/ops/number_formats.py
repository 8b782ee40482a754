"""The small number formats of the release: rounding to them, and their bytes.

E4M3 (no infinities, largest 448), E2M1 (+-{0, .5, 1, 1.5, 2, 3, 4, 6}), E8M0 (powers of two).
Source: model.md sections 3.2-3.6.
"""

import itertools

import jax
import jax.numpy as jnp

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def exponent(x: jax.Array) -> jax.Array:
  """floor(log2 |x|) of normal float32 values, from the bits."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return ((bits >> 23) & 0xFF) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
  """2^exponent as float32, exact for -126 <= exponent <= 127."""
  return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def _round(x: jax.Array, mantissa_bits: int, min_exponent: int, largest: float) -> jax.Array:
  x = jnp.clip(x.astype(jnp.float32), -largest, largest)
  step = power_of_two(jnp.maximum(exponent(x), min_exponent) - mantissa_bits)
  return jnp.round(x / step) * step  # both exact: step is a power of two


def round_e4m3(x: jax.Array) -> jax.Array:
  """Nearest E4M3 value, ties to even, saturating at 448. float32 in, float32 out."""
  return _round(x, mantissa_bits=3, min_exponent=-6, largest=E4M3_MAX)


def round_e2m1(x: jax.Array) -> jax.Array:
  """Nearest E2M1 value, ties to even code, saturating at 6. float32 in, float32 out."""
  return _round(x, mantissa_bits=1, min_exponent=0, largest=E2M1_MAX)


def quotient_e2m1(x: jax.Array, scale: jax.Array) -> jax.Array:
  """round_e2m1(x / scale) for a scale > 0 of few bits, from exact products.

  Compilers may turn a division by a shared divisor into a product with its reciprocal, which
  misses exact ties; scale * midpoint has none of that.
  """
  size = jnp.abs(x)
  value = jnp.zeros_like(size)
  for code, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
    middle = scale * ((low + high) / 2)
    above = size >= middle if code % 2 else size > middle  # a tie goes to the even code
    value += jnp.where(above, high - low, 0.0)
  return jnp.where(jnp.signbit(x), -value, value)


def quotient_e4m3(x: jax.Array, divisor: float) -> jax.Array:
  """round_e4m3(x / divisor) for x >= 0 and a divisor of few bits, exact for the same reason."""
  near = jnp.minimum(x * jnp.float32(1 / divisor), E4M3_MAX)
  step = power_of_two(jnp.maximum(exponent(near), -6) - 3)
  low = jnp.floor(near / step)
  middle = (low + 0.5) * step * divisor
  up = (x > middle) | ((x == middle) & (low % 2 == 1))
  return jnp.minimum((low + up) * step, E4M3_MAX)


def ceil_power_of_two(x: jax.Array) -> jax.Array:
  """Smallest power of two >= x > 0, from the bits: exact powers stay as they are."""
  bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
  bump = ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
  return power_of_two(exponent(x.astype(jnp.float32)) + bump)


def encode_e4m3(values: jax.Array) -> jax.Array:
  """Bytes of float32 values that are E4M3 values already."""
  return jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)


def decode_e4m3(codes: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def encode_e8m0(scales: jax.Array) -> jax.Array:
  """Bytes e of scales 2^(e - 127)."""
  return (exponent(scales) + 127).astype(jnp.uint8)


def decode_e8m0(codes: jax.Array) -> jax.Array:
  """2^(e - 127); e = 0 is the subnormal 2^-127, which the bits of float32 hold as well."""
  codes = codes.astype(jnp.int32)
  normal = jax.lax.bitcast_convert_type(codes << 23, jnp.float32)
  return jnp.where(
    codes == 0, jax.lax.bitcast_convert_type(jnp.int32(1 << 22), jnp.float32), normal
  )


def encode_e2m1(values: jax.Array) -> jax.Array:
  """4-bit codes (uint8) of E2M1 values; the sign is bit 3, so -0 is 8."""
  code = jnp.searchsorted(jnp.asarray(E2M1_VALUES), jnp.abs(values)).astype(jnp.uint8)
  return code | (jnp.signbit(values).astype(jnp.uint8) << 3)


def decode_e2m1(codes: jax.Array) -> jax.Array:
  magnitude = jnp.asarray(E2M1_VALUES, jnp.float32)[codes & 7]
  return jnp.where(codes & 8, -magnitude, magnitude)


def pack_e2m1(values: jax.Array) -> jax.Array:
  """[..., d] E2M1 values -> [..., d/2] bytes, the even channel in the low nibble."""
  codes = encode_e2m1(values)
  return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: jax.Array) -> jax.Array:
  """[..., d/2] bytes -> [..., d] float32."""
  nibbles = jnp.stack([packed & 15, packed >> 4], axis=-1)
  return decode_e2m1(nibbles.reshape(*packed.shape[:-1], -1))
