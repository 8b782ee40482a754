"""Products add up in float32 and are rounded once, forward and backward.

Legend: X tokens, K contracted channels, M columns, G groups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.matmul import dot, exact_dot

X, K, M, G = 40, 96, 24, 3
HALF_STEP = 2.0**-8  # of bfloat16, relative


def normal(seed, *shape, dtype="float32"):
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def float64(*arrays):
  return [np.float64(np.asarray(x, np.float32)) for x in arrays]


def largest_error(got, want):
  return np.abs(np.float64(np.asarray(got, np.float32)) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("spec", ["xk,km->xm", "xgk,gkm->xgm", "xk,gkm->xgm"])
def test_bfloat16_dot_and_its_gradients_are_rounded_once(spec):
  of_x, of_w, of_out = spec.replace("->", ",").split(",")
  size = {"x": X, "k": K, "m": M, "g": G}
  shape = lambda axes: [size[axis] for axis in axes]
  x, weight = normal(0, *shape(of_x), dtype="bfloat16"), normal(1, *shape(of_w))
  d_out = normal(2, *shape(of_out), dtype="bfloat16")
  out, vjp = jax.vjp(lambda x, w: dot(spec, x, w), x, weight)
  d_x, d_weight = vjp(d_out)
  assert (out.dtype, d_x.dtype, d_weight.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  x64, w64, d64 = float64(x, weight.astype(jnp.bfloat16), d_out)
  assert largest_error(out, np.einsum(spec, x64, w64)) <= HALF_STEP
  assert largest_error(d_x, np.einsum(f"{of_out},{of_w}->{of_x}", d64, w64)) <= HALF_STEP
  assert largest_error(d_weight, np.einsum(f"{of_x},{of_out}->{of_w}", x64, d64)) < 1e-6


def test_float32_dot_keeps_all_bits():
  x_XK, weight_KM = normal(0, X, K), normal(1, K, M)
  x64, w64 = float64(x_XK, weight_KM)
  assert largest_error(dot("xk,km->xm", x_XK, weight_KM), x64 @ w64) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["xk,km->xm", "...gk,mgk->...m"])
def test_a_float32_weight_keeps_its_bits_beside_any_operand(spec, dtype):
  of_x, of_w, of_out = spec.replace("->", ",").replace("...", "x").split(",")
  size = {"x": X, "k": K, "m": M, "g": G}
  shape = lambda axes: [size[axis] for axis in axes]
  x, weight = normal(0, *shape(of_x), dtype=dtype), normal(1, *shape(of_w))
  d_out = normal(2, *shape(of_out))
  out, vjp = jax.vjp(lambda x, w: exact_dot(spec, x, w), x, weight)
  d_x, d_weight = vjp(d_out)
  assert (out.dtype, d_x.dtype, d_weight.dtype) == (jnp.float32, x.dtype, jnp.float32)
  x64, w64, d64 = float64(x, weight, d_out)
  assert largest_error(out, np.einsum(f"{of_x},{of_w}->{of_out}", x64, w64)) < 1e-6
  assert largest_error(d_weight, np.einsum(f"{of_out},{of_x}->{of_w}", d64, x64)) < 1e-6
  rounded = 1e-6 if dtype == "float32" else HALF_STEP
  assert largest_error(d_x, np.einsum(f"{of_out},{of_w}->{of_x}", d64, w64)) <= rounded


def test_the_pieces_of_a_weight_survive_compilation():
  """A compiler that drops casts to bfloat16 and back would lose the second and third piece."""
  x_XK, weight_KM = normal(0, X, K, dtype="bfloat16"), normal(1, K, M)
  product = lambda x, w: exact_dot("xk,km->xm", x, w)
  np.testing.assert_array_equal(jax.jit(product)(x_XK, weight_KM), product(x_XK, weight_KM))
