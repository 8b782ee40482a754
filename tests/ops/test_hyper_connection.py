"""Reading and writing of streams. Legend: X tokens, c streams, D width, M = 2c + c*c."""

import functools

import jax
import numpy as np

from deepseek_jax.ops.hyper_connection import collapse, expand, mixing
from deepseek_jax.ops.sinkhorn import sinkhorn

X, C, D = 7, 4, 10
NORM_EPS, HC_EPS, ITERATIONS = 1e-20, 1e-6, 20

predict = jax.jit(
  functools.partial(
    mixing, norm_eps=NORM_EPS, hc_eps=HC_EPS, normalize=lambda x: sinkhorn(x, ITERATIONS, HC_EPS)
  )
)


def random(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_constant_coefficients_reduce_to_a_plain_residual():
  # model.md section 8: pre one-hot, post 1, comb the identity.
  streams_XcD, first_Xc = random(0, X, C, D), np.eye(C, dtype=np.float32)[[0] * X]
  x_XD = collapse(streams_XcD, first_Xc)
  np.testing.assert_array_equal(x_XD, streams_XcD[:, 0])
  y_XD = np.tanh(x_XD)
  out = expand(y_XD, streams_XcD, np.ones((X, C), np.float32), np.stack([np.eye(C)] * X))
  np.testing.assert_allclose(out, streams_XcD + y_XD[:, None], rtol=1e-6)


def test_new_streams_sum_over_the_old_axis_of_the_matrix():
  y_XD, streams_XcD, post_Xc, comb_Xcc = (
    random(i, *s) for i, s in enumerate([(X, D), (X, C, D), (X, C), (X, C, C)])
  )
  want = [
    post_Xc[:, [k]] * y_XD + sum(comb_Xcc[:, j, k, None] * streams_XcD[:, j] for j in range(C))
    for k in range(C)
  ]
  out_XcD = expand(y_XD, streams_XcD, post_Xc, comb_Xcc)
  np.testing.assert_allclose(out_XcD, np.stack(want, 1), rtol=1e-5, atol=1e-6)


def test_coefficients_are_the_formula():
  streams_XcD, fn_McD = random(0, X, C, D), random(1, 2 * C + C * C, C, D)
  base_M, scale_3 = random(2, 2 * C + C * C), np.float32([0.3, 0.5, 0.7])
  got = predict(streams_XcD, fn_McD, base_M, scale_3)
  flat = np.float64(streams_XcD).reshape(X, -1)
  mix = flat @ fn_McD.reshape(-1, C * D).T / np.sqrt(np.mean(flat**2, -1, keepdims=True) + NORM_EPS)
  sigmoid = lambda x: 1 / (1 + np.exp(-x))
  pre, post, comb = np.split(mix, [C, 2 * C], -1)
  np.testing.assert_allclose(got.pre_Xc, sigmoid(pre * 0.3 + base_M[:C]) + HC_EPS, rtol=1e-5)
  np.testing.assert_allclose(got.post_Xc, 2 * sigmoid(post * 0.5 + base_M[C : 2 * C]), rtol=1e-5)
  logits_Xcc = (comb * 0.7 + base_M[2 * C :]).reshape(X, C, C).astype(np.float32)
  np.testing.assert_allclose(
    got.comb_Xcc, sinkhorn(logits_Xcc, ITERATIONS, HC_EPS), rtol=1e-4, atol=1e-6
  )


def test_streams_of_zeros_have_finite_coefficients_and_gradients():
  fn_McD, base_M = random(1, 2 * C + C * C, C, D), random(2, 2 * C + C * C)

  def total(streams_XcD):
    site = predict(streams_XcD, fn_McD, base_M, np.ones(3, np.float32))
    return site.pre_Xc.sum() + site.post_Xc.sum() + (site.comb_Xcc**2).sum()

  value, grad = jax.jit(jax.value_and_grad(total))(np.zeros((X, C, D), np.float32))
  assert np.isfinite(value) and np.isfinite(grad).all()


def test_sums_over_streams_are_float32_and_come_back_in_the_streams_dtype():
  streams_XcD = np.ones((1, 3, 1), np.float32) * np.float32([[1.0], [2.0**-8], [2.0**-8]])
  streams_XcD = jax.numpy.asarray(streams_XcD, "bfloat16")
  out = collapse(streams_XcD, np.ones((1, 3), np.float32))
  assert out.dtype == "bfloat16" and out[0, 0] == 1 + 2.0**-7  # bfloat16 sums would stay at 1
