"""Block quantizers of activations, KV entries and experts, and their straight-through versions.

A quantizer takes [..., d] and returns float32 values of the small format [..., d] with their
scales [..., d / block]; value * scale is what a reader of the cache sees.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from deepseek_jax.ops import number_formats as formats

# Floors of the absolute maximum and the reciprocals, multiplied in float32 as the release does
# (model.md sections 3.2 and 3.3).
_FP8_FLOOR = 1e-4
_INDEXER_FLOOR = 6 * 2.0**-126
_MAIN_FLOOR = 6 * 2.0**-9

FP8_BLOCK, INDEXER_BLOCK, MAIN_BLOCK, EXPERT_BLOCK = 32, 32, 16, 32


def _split(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
  if x.dtype == jnp.bfloat16:
    # The compiler may keep float32 bits where the program rounds to bfloat16; this one must not.
    x = jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
  x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
  return x, jnp.max(jnp.abs(x), axis=-1)


def quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """E4M3 with a power-of-two scale per 32 channels: window entries and activations."""
  blocks, largest = _split(x, FP8_BLOCK)
  largest = jnp.maximum(largest, _FP8_FLOOR)
  scale = formats.ceil_power_of_two(largest * jnp.float32(1 / formats.E4M3_MAX))
  return formats.round_e4m3(blocks / scale[..., None]).reshape(x.shape), scale


def quantize_indexer(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """E2M1 with a power-of-two scale per 32 channels: indexer queries and keys."""
  blocks, largest = _split(x, INDEXER_BLOCK)
  largest = jnp.maximum(largest, _INDEXER_FLOOR)
  scale = formats.ceil_power_of_two(largest * jnp.float32(1 / formats.E2M1_MAX))
  return formats.round_e2m1(blocks / scale[..., None]).reshape(x.shape), scale


def quantize_main(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """E2M1 with an E4M3 scale per 16 channels and no second-level scale: compressed entries."""
  blocks, largest = _split(x, MAIN_BLOCK)
  scale = formats.quotient_e4m3(jnp.maximum(largest, _MAIN_FLOOR), formats.E2M1_MAX)
  return formats.quotient_e2m1(blocks, scale[..., None]).reshape(x.shape), scale


def quantize_expert(w: jax.Array) -> tuple[jax.Array, jax.Array]:
  """E2M1 with the smallest power-of-two scale that reaches 32 weights: experts as they are stored.

  The same to the bit as checkpoint/released_formats.py, for weights of at least 2^-120 or 0.
  """
  blocks, largest = _split(w, EXPERT_BLOCK)
  low = formats.power_of_two(jnp.maximum(formats.exponent(largest) - 2, -126))
  scale = jnp.where(low * formats.E2M1_MAX < largest, 2 * low, low)  # exact, unlike a quotient
  return formats.round_e2m1(blocks / scale[..., None]).reshape(w.shape), scale


def dequantize(values: jax.Array, scale: jax.Array) -> jax.Array:
  """[..., d] values times their block's scale, float32."""
  block = values.shape[-1] // scale.shape[-1]
  return values * jnp.repeat(scale, block, axis=-1)


def _straight_through(quantizer: Callable) -> Callable:
  """x -> what a reader sees of quantized x, in x.dtype; its gradient is the identity."""

  @jax.custom_vjp
  def fake(x: jax.Array) -> jax.Array:
    return dequantize(*quantizer(x)).astype(x.dtype)

  fake.defvjp(lambda x: (fake(x), None), lambda _, dy: (dy,))
  return fake


fake_fp8 = _straight_through(quantize_fp8)
fake_indexer = _straight_through(quantize_indexer)
fake_main = _straight_through(quantize_main)
_fake_expert_rows = _straight_through(quantize_expert)


def fake_expert(w_EIO: jax.Array) -> jax.Array:
  """[experts, inputs, outputs], in blocks of inputs: what a reader of the stored weights sees."""
  return jnp.swapaxes(_fake_expert_rows(jnp.swapaxes(w_EIO, -1, -2)), -1, -2)
