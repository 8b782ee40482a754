"""Quantizers against recorded bytes or the exporter's, and their fake versions' values and
gradients.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.checkpoint import released_formats
from deepseek_jax.checkpoint.safetensors_file import read_safetensors
from deepseek_jax.ops import number_formats as formats
from deepseek_jax.ops import quantize

VECTORS = read_safetensors(
  pathlib.Path(__file__).parents[1] / "reference" / "quant_vectors" / "vectors.safetensors"
)
QUANTIZERS = {
  "fp8_block32": (quantize.quantize_fp8, quantize.fake_fp8, 32),
  "fp4_block32": (quantize.quantize_indexer, quantize.fake_indexer, 32),
  "fp4_block16": (quantize.quantize_main, quantize.fake_main, 16),
}
every_quantizer = pytest.mark.parametrize("name", sorted(QUANTIZERS))
both_ways = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])


@every_quantizer
@both_ways
def test_codes_scales_and_values_are_the_recorded_ones(name, run):
  quantizer, fake, _ = QUANTIZERS[name]
  encode_scale = formats.encode_e4m3 if name == "fp4_block16" else formats.encode_e8m0
  codes = "codes" if name == "fp8_block32" else "packed"
  encode = formats.encode_e4m3 if codes == "codes" else formats.pack_e2m1

  def encoded(x):
    values, scale = quantizer(x)
    return encode(values), encode_scale(scale), fake(x)

  got = run(encoded)(jnp.asarray(VECTORS[f"{name}.input"]))
  for part, array in zip((codes, "scales", "dequant"), got, strict=True):
    np.testing.assert_array_equal(array, VECTORS[f"{name}.{part}"], err_msg=part)
    assert array.dtype == VECTORS[f"{name}.{part}"].dtype


@every_quantizer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fake_quantization_has_the_identity_as_gradient(name, dtype):
  _, fake, _ = QUANTIZERS[name]
  x, d_y = jax.random.normal(jax.random.key(0), (2, 3, 64), dtype)
  y, vjp = jax.vjp(jax.jit(fake), x)
  assert np.any(y != x)
  np.testing.assert_array_equal(vjp(d_y)[0], d_y)
  assert vjp(d_y)[0].dtype == y.dtype == x.dtype


@every_quantizer
def test_a_group_of_zeros_stays_zero_and_its_scale_is_the_floor(name):
  quantizer, fake, block = QUANTIZERS[name]
  x = np.zeros(64, np.float32)
  x[block:] = 6.0
  floor = {"fp8_block32": 2.0**-22, "fp4_block32": 2.0**-126, "fp4_block16": 2.0**-9}[name]
  _, scale = jax.jit(quantizer)(x)
  assert scale[0] == floor  # 1e-4 / 448 = 2^-22.1, 6 * 2^-126 / 6 and 6 * 2^-9 / 6
  y = jax.jit(fake)(x)
  np.testing.assert_array_equal(y[:block], 0)
  np.testing.assert_array_equal(y[block:], 6)


@pytest.mark.parametrize("largest", [0.0, 2e-5, 9.9e-5])
def test_fp8_scales_do_not_fall_below_that_of_the_floor(largest):
  _, scale = jax.jit(quantize.quantize_fp8)(jnp.full(32, largest))
  assert scale == 2.0**-22


def test_main_entries_above_six_rounded_down_scales_are_clipped():
  x = np.zeros(16, np.float32)
  x[:3] = 6.375, -6.375, 3.0  # 6.375 / 6 = 1.0625 is a tie between the E4M3 values 1 and 1.125
  values, scale = jax.jit(quantize.quantize_main)(x)
  assert scale == 1.0
  np.testing.assert_array_equal(values[:3], [6, -6, 3])


def test_main_scales_saturate_so_that_values_end_at_2688():
  x = np.full(16, 5000.0, np.float32)
  values, scale = jax.jit(quantize.quantize_main)(x)
  assert scale == 448 and np.all(values == 6)
  np.testing.assert_array_equal(jax.jit(quantize.fake_main)(x), 2688)


def test_power_of_two_scales_of_exact_multiples_are_not_bumped():
  exponents = np.arange(-10, 11)
  for quantizer, largest in ((quantize.quantize_fp8, 448.0), (quantize.quantize_indexer, 6.0)):
    x = np.zeros((len(exponents), 32), np.float32)
    x[:, 5] = largest * np.exp2(exponents)
    _, scale = jax.jit(quantizer)(x)
    np.testing.assert_array_equal(scale[:, 0], np.exp2(exponents))


@every_quantizer
def test_a_compiled_program_quantizes_the_bfloat16_number_that_it_says(name):
  """Fused with what comes before it, the quantizer must not see the float32 bits."""
  _, fake, _ = QUANTIZERS[name]
  x, y = jax.random.normal(jax.random.key(1), (2, 64, 512), jnp.bfloat16)
  of_product = lambda x, y: fake(x * y)
  np.testing.assert_array_equal(jax.jit(of_product)(x, y), of_product(x, y))


def expert_weights():
  """[E, in, out] of many magnitudes, with zeros, and with largest values at and beside 6 x 2^k."""
  random = np.random.default_rng(0)
  w_EIO = random.normal(size=(3, 96, 40)) * 2.0 ** random.integers(-30, 8, size=(3, 96, 40))
  w_EIO[0, :32, 0] = 0
  for column, factor in enumerate((1.0, 1 + 2.0**-22, 1 - 2.0**-22, 0.5, 1.5), 1):
    w_EIO[1, 32:64, column] = np.linspace(-0.9, 0.9, 32) * 6 * 2.0**-5
    w_EIO[1, 40, column] = 6 * 2.0**-5 * factor
  w_EIO[2, :32, 7] = np.repeat([2.5, 3.5, 5.0, 0.25, 1.25, 1.75, 0.75, 6.0], 4)  # ties
  return np.float32(w_EIO)


@both_ways
def test_experts_are_what_the_exporter_stores(run):
  w_EIO = expert_weights()
  got_EIO = np.asarray(run(quantize.fake_expert)(jnp.asarray(w_EIO)))
  for got, w in zip(got_EIO, w_EIO, strict=True):
    np.testing.assert_array_equal(
      got.T, released_formats.decode(*released_formats.encode(w.T, "fp4"))
    )
  assert np.mean(got_EIO != w_EIO) > 0.5
  np.testing.assert_array_equal(run(quantize.fake_expert)(jnp.asarray(got_EIO)), got_EIO)


def test_the_gradient_of_an_expert_is_that_of_what_it_computes_with():
  w_EIO, d_EIO = jnp.asarray(expert_weights()), jax.random.normal(jax.random.key(0), (3, 96, 40))
  y, vjp = jax.vjp(jax.jit(quantize.fake_expert), w_EIO)
  assert np.any(y != w_EIO)
  np.testing.assert_array_equal(vjp(d_EIO)[0], d_EIO)
