"""RMSNorm keeps its statistics in float32 and survives rows of zeros."""

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.ops.rms_norm import rms_norm

EPS = 1e-20  # of the release


def test_rows_get_unit_root_mean_square_times_the_gain_however_small_they_are():
  x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
  gain = np.linspace(0.5, 2, 64, dtype=np.float32)
  want = x / np.sqrt(np.mean(np.float64(x) ** 2, -1, keepdims=True)) * gain
  for scale in (1.0, 1e-4, 1e-6):
    np.testing.assert_allclose(rms_norm(x * scale, gain, eps=EPS), want, rtol=1e-5)


def test_a_row_of_zeros_gives_zeros_and_a_finite_gradient():
  value, vjp = jax.vjp(lambda x: rms_norm(x, jnp.ones(8), eps=EPS), jnp.zeros((2, 8)))
  assert np.all(value == 0)
  assert np.isfinite(vjp(jnp.ones((2, 8)))[0]).all()


def test_bfloat16_is_rounded_once_at_the_end():
  x = jax.random.normal(jax.random.key(0), (4, 256), "bfloat16")
  gain = jnp.linspace(0.5, 2, 256)
  y = rms_norm(x, gain, eps=EPS)
  assert y.dtype == "bfloat16"
  np.testing.assert_array_equal(y, rms_norm(x.astype("float32"), gain, eps=EPS).astype("bfloat16"))
