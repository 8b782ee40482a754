"""Rounding and bytes of the small formats, also where the compiler rearranges the arithmetic."""

import jax
import ml_dtypes
import numpy as np
import pytest

from deepseek_jax.ops import number_formats as formats

both_ways = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
CODES = np.arange(256, dtype=np.uint8)


@both_ways
def test_e2m1_ties_go_to_the_even_code(run):
  # model.md section 3.4
  middle = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
  even = np.float32([0, 1, 1, 2, 2, 4, 4])
  np.testing.assert_array_equal(run(formats.round_e2m1)(middle), even)
  np.testing.assert_array_equal(run(formats.round_e2m1)(-middle), -even)


@both_ways
def test_rounding_next_to_a_middle_goes_to_the_nearer_value(run):
  middle = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
  values = np.float32(formats.E2M1_VALUES)
  below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(9))
  np.testing.assert_array_equal(run(formats.round_e2m1)(below), values[:-1])
  np.testing.assert_array_equal(run(formats.round_e2m1)(above), values[1:])


@both_ways
def test_rounding_saturates_at_the_largest_value(run):
  x = np.float32([448, 464, 1e9, -1e9])
  np.testing.assert_array_equal(run(formats.round_e4m3)(x), np.float32([448, 448, 448, -448]))
  np.testing.assert_array_equal(run(formats.round_e2m1)(x), np.float32([6, 6, 6, -6]))


@both_ways
def test_e4m3_rounding_is_that_of_the_dtype_below_saturation(run):
  x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
  x = (x * np.exp2(np.arange(4096) % 20 - 12)).clip(-448, 448).astype(np.float32)
  want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
  np.testing.assert_array_equal(run(formats.round_e4m3)(x), want)


@both_ways
def test_e4m3_and_e2m1_bytes_survive_decoding_and_encoding(run):
  number = CODES[(CODES & 0x7F) != 0x7F]  # 127 and 255 are NaN
  there_and_back = lambda c: formats.encode_e4m3(formats.round_e4m3(formats.decode_e4m3(c)))
  np.testing.assert_array_equal(run(there_and_back)(number), number)
  packed = lambda c: formats.pack_e2m1(formats.unpack_e2m1(c))
  np.testing.assert_array_equal(run(packed)(CODES), CODES)


@both_ways
def test_e8m0_bytes_are_powers_of_two_down_to_the_subnormal(run):
  exponent = CODES[:255].astype(np.int32) - 127  # 255 is NaN
  np.testing.assert_array_equal(
    np.asarray(run(formats.decode_e8m0)(CODES[:255])).view(np.uint32),
    np.ldexp(np.float32(1), exponent).view(np.uint32),
  )
  normal = np.ldexp(np.float32(1), exponent[1:])
  np.testing.assert_array_equal(run(formats.encode_e8m0)(normal), CODES[1:255])


@both_ways
def test_checkpoint_bytes_decode_to_the_published_values(run):
  # Two rows of the released checkpoint, model.md section 8.
  fp8 = np.uint8([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5])
  row = run(lambda c, s: formats.decode_e4m3(c) * formats.decode_e8m0(s))(fp8, np.uint8(0x73))
  np.testing.assert_array_equal(
    row,
    [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125],
  )
  fp4 = np.uint8([0xA0, 0xA8, 0xEC, 0x4A, 0xAD, 0xAF, 0x42, 0xAA])
  row = run(lambda c, s: formats.unpack_e2m1(c) * formats.decode_e8m0(s))(fp4, np.uint8(0x78))
  unit = 0.0078125
  np.testing.assert_array_equal(
    row, unit * np.float32([0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1])
  )


@both_ways
def test_smallest_power_of_two_above_leaves_exact_powers_alone(run):
  powers = np.ldexp(np.float32(1), np.arange(-126, 127))
  up = run(formats.ceil_power_of_two)
  np.testing.assert_array_equal(up(powers), powers)
  np.testing.assert_array_equal(up(np.nextafter(powers, np.float32(np.inf))), 2 * powers)


@both_ways
def test_quotients_round_the_exact_quotient(run):
  """Scales have few bits, so float64 holds every quotient's ties exactly."""
  rng = np.random.default_rng(1)
  scale_X1 = np.float32(rng.integers(8, 16, (512, 1)) * np.exp2(rng.integers(-12, 6, (512, 1))))
  middle = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.7])
  ties = scale_X1 * middle
  x = np.concatenate([ties, -ties, np.nextafter(ties, np.float32(0)), ties * 1.01], axis=1)
  exact = np.clip(x.astype(np.float64) / scale_X1, -6, 6)
  np.testing.assert_array_equal(
    run(formats.quotient_e2m1)(x, scale_X1),
    exact.astype(ml_dtypes.float4_e2m1fn).astype(np.float32),
  )
  largest = np.abs(x).reshape(-1)
  exact = np.minimum(largest.astype(np.float64) / 6, 448)
  np.testing.assert_array_equal(
    run(lambda x: formats.quotient_e4m3(x, 6.0))(largest),
    exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
  )
