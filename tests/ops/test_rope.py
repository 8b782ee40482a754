"""Rotations and their frequencies. Legend: B rows, S slots, H heads, d channels, R rotated ones."""

import jax
import numpy as np
import pytest

from deepseek_jax.config import RopeConfig
from deepseek_jax.ops.rope import frequencies, rotate

RELEASE = RopeConfig()
POSITIONS_BS = np.random.default_rng(0).integers(0, 5000, (2, 5)).astype(np.int32)


def random(*shape):
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def test_yarn_frequencies_are_those_of_the_release():
  # model.md sections 2.3 and 8: pairs up to 15 keep their frequency, pairs from 25 are divided.
  f = frequencies(RELEASE, 64, compressed=True)
  plain = 160000.0 ** (-np.arange(32) / 32)
  assert f[0] == 1.0 and f.dtype == np.float32
  np.testing.assert_allclose(f[31], 160000.0 ** (-62 / 64) / 16, rtol=1e-6)
  np.testing.assert_allclose(f[:16], plain[:16], rtol=1e-6)
  np.testing.assert_allclose(f[25:], plain[25:] / 16, rtol=1e-6)
  np.testing.assert_allclose(f[20], plain[20] * (0.5 / 16 + 0.5), rtol=1e-6)


def test_layers_without_entries_have_plain_frequencies():
  f = frequencies(RELEASE, 64, compressed=False)
  np.testing.assert_allclose(f, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)


@pytest.mark.parametrize("heads", [(), (3,)])
def test_pairs_of_the_last_channels_turn_like_complex_numbers(heads):
  x = random(2, 5, *heads, 12)
  f = frequencies(RELEASE, 8, compressed=True)
  turned = x[..., 4::2] + 1j * x[..., 5::2]
  angle = POSITIONS_BS.astype(np.float32)[..., None] * f
  turned *= np.exp(1j * angle.reshape(2, 5, *(1,) * len(heads), 4))
  y = np.asarray(rotate(x, POSITIONS_BS, f))
  np.testing.assert_array_equal(y[..., :4], x[..., :4])
  np.testing.assert_allclose(y[..., 4::2], turned.real, atol=1e-5)
  np.testing.assert_allclose(y[..., 5::2], turned.imag, atol=1e-5)


def test_the_inverse_turns_back():
  x_BSHd = random(2, 5, 3, 12)
  f = frequencies(RELEASE, 8, compressed=False)
  there = rotate(x_BSHd, POSITIONS_BS, f)
  assert np.abs(there - x_BSHd).max() > 0.1
  np.testing.assert_allclose(rotate(there, POSITIONS_BS, f, inverse=True), x_BSHd, atol=1e-5)


def test_products_depend_on_the_distance_alone():
  q_d, k_d = random(2, 8)
  f = frequencies(RELEASE, 8, compressed=False)
  at = lambda x_d, position: rotate(x_d, np.int32(position), f)
  product = lambda t, s: float(at(q_d, t) @ at(k_d, s))
  assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-5)
  assert abs(product(7, 3) - product(3, 7)) > 0.1


def test_bfloat16_stays_bfloat16_and_turns_in_float32():
  x_Sd = jax.numpy.asarray(random(5, 8), "bfloat16")
  f = frequencies(RELEASE, 8, compressed=True)
  y = rotate(x_Sd, POSITIONS_BS[0], f)
  exact = rotate(x_Sd.astype("float32"), POSITIONS_BS[0], f)
  assert y.dtype == "bfloat16"
  np.testing.assert_array_equal(y, exact.astype("bfloat16"))
