"""Bytes and scales of the release: published bytes, tiles, rounding, and values that come back."""

import ml_dtypes
import numpy as np
import pytest

from deepseek_jax.checkpoint.released_formats import decode, encode
from deepseek_jax.ops import number_formats as formats

# model.md section 8: real bytes of the release, their scale byte and what they mean.
FP8 = np.uint8([0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5])
FP8_VALUES = [
  -0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125
]  # fmt: skip
FP4 = np.uint8([0xA0, 0xA8, 0xEC, 0x4A, 0xAD, 0xAF, 0x42, 0xAA])
FP4_VALUES = 0.0078125 * np.float32([0, -1, -0.0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1])


def as_e8m0(code, shape):
  return np.full(shape, code, np.uint8).view(ml_dtypes.float8_e8m0fnu)


def test_bytes_of_the_released_checkpoint_decode_to_the_published_values():
  fp8 = np.concatenate([FP8, np.zeros(24, np.uint8)])[None].view(ml_dtypes.float8_e4m3fn)
  np.testing.assert_array_equal(decode(fp8, as_e8m0(0x73, (1, 1)))[0, :8], FP8_VALUES)
  fp4 = np.concatenate([FP4, FP4])[None].view(np.int8)
  wanted = np.concatenate([FP4_VALUES, FP4_VALUES])
  np.testing.assert_array_equal(decode(fp4, as_e8m0(0x78, (1, 1)))[0], wanted)


def test_the_published_values_encode_to_the_bytes_of_the_released_checkpoint():
  """A value of 448 or 6 times the scale makes the block's scale the released one."""
  block = np.float32([*FP8_VALUES, 448 * 2.0**-12, *[0] * 23])[None]
  weight, scale = encode(block, "fp8")
  np.testing.assert_array_equal(weight.view(np.uint8)[0, :8], FP8)
  assert scale.view(np.uint8) == 0x73
  weight, scale = encode(np.concatenate([FP4_VALUES, FP4_VALUES])[None], "fp4")
  np.testing.assert_array_equal(weight.view(np.uint8)[0], np.concatenate([FP4, FP4]))
  assert scale.view(np.uint8) == 0x78


def test_a_scale_covers_a_tile_of_32_by_32_and_the_last_tile_may_be_cut():
  ones = np.ones((40, 64), ml_dtypes.float8_e4m3fn)
  scale = np.uint8([[127, 128], [129, 130]]).view(ml_dtypes.float8_e8m0fnu)
  values = decode(ones, scale)
  assert values.shape == (40, 64)
  np.testing.assert_array_equal(values[[0, 31, 32, 39]][:, [0, 31, 32, 63]], [
    [1, 1, 2, 2], [1, 1, 2, 2], [4, 4, 8, 8], [4, 4, 8, 8],
  ])  # fmt: skip
  np.testing.assert_array_equal(decode(ones[30:35], scale, 30), values[30:35])
  np.testing.assert_array_equal(decode(ones[33:35], scale[1:], 33), values[33:35])


@pytest.mark.parametrize(
  ("stored", "largest", "rounded"),
  [("fp4", 6.0, formats.round_e2m1), ("fp8", 448.0, formats.round_e4m3)],
)
def test_rounding_is_that_of_the_number_formats_ties_included(stored, largest, rounded):
  grid = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.3, 1.3, 4.9, 5.1, 0, 1 / 512, 17, 19])
  values = np.concatenate([grid, -grid, np.float32([largest, -largest])])[None]
  values = np.clip(values, -largest, largest)
  weight, scale = encode(values, stored)
  np.testing.assert_array_equal(decode(weight, scale), np.asarray(rounded(values)))


@pytest.mark.parametrize("stored", ["fp8", "fp8_rows", "fp4"])
def test_decoded_values_encode_to_the_same_values_whatever_scale_they_had(stored):
  """Released scales need not be the smallest that fit."""
  random = np.random.default_rng(0)
  scale = np.exp2(random.integers(-20, 4, (40, 3))).astype(np.float32)
  values = random.normal(size=(40, 96)).astype(np.float32) * np.repeat(scale, 32, axis=1)
  values[3] = 0
  once = decode(*encode(values, stored))
  np.testing.assert_array_equal(decode(*encode(once, stored)), once)
  np.testing.assert_array_equal(decode(*encode(once * 8, stored)), once * 8)


@pytest.mark.parametrize(("stored", "bound"), [("fp8", 2**-4), ("fp8_rows", 2**-4), ("fp4", 1 / 3)])
def test_an_error_is_at_most_half_a_step_of_the_format(stored, bound):
  """Largest relative error of values near the top of their block, where steps are relative."""
  values = np.random.default_rng(1).uniform(1, 2, (64, 64)).astype(np.float32)
  error = np.abs(decode(*encode(values, stored)) - values)
  assert 0 < error.max() <= bound * values.max()


def test_a_scale_that_is_no_number_is_an_error():
  with pytest.raises(ValueError, match="a scale is not a number"):
    decode(np.ones((1, 32), ml_dtypes.float8_e4m3fn), as_e8m0(255, (1, 1)))
