"""The three quantizers against recorded bytes, and their fake versions' values and gradients."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
