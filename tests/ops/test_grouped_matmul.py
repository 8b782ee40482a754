"""Grouped products against a loop. Legend: P rows, G groups, K input width, N output width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.grouped_matmul import grouped_matmul

ROWS = {
  "mixed": (8, 0, 16, 4),
  "one group": (0, 40, 0, 0),
  "none": (0, 0, 0, 0),
  "full": (8, 8, 8, 24),
}
P, K, N, BLOCK = 48, 5, 6, 4


def inputs(rows, dtype="float32"):
  keys = jax.random.split(jax.random.key(0), 3)
  x_PK = jax.random.normal(keys[0], (P, K), dtype)
  x_PK = jnp.where(np.arange(P)[:, None] < sum(rows), x_PK, 0)
  return x_PK, jax.random.normal(keys[1], (len(rows), K, N), dtype)


def multiply(x_PK, w_GKN, rows):
  return grouped_matmul(
    x_PK, w_GKN, jnp.array(rows, jnp.int32), block_rows=BLOCK, implementation="reference"
  )


def loop(x_PK, w_GKN, rows):
  ends = np.cumsum(rows)
  parts = [x_PK[e - r : e] @ w for e, r, w in zip(ends, rows, w_GKN, strict=True)]
  return jnp.concatenate([*parts, jnp.zeros((P - sum(rows), N))])


@pytest.mark.parametrize("load", ROWS)
def test_rows_meet_their_group_s_matrix_in_value_and_gradient(load):
  rows, d_PN = ROWS[load], jax.random.normal(jax.random.key(1), (P, N))
  d_PN = jnp.where(np.arange(P)[:, None] < sum(rows), d_PN, 0)
  run = lambda f: jax.jit(
    lambda x, w: (f(x, w, rows), *jax.vjp(lambda *a: f(*a, rows), x, w)[1](d_PN))
  )
  for got, want in zip(run(multiply)(*inputs(rows)), run(loop)(*inputs(rows)), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_bfloat16_products_add_up_in_float32():
  x_PK, w_GKN = inputs(ROWS["mixed"], "bfloat16")
  y_PN = multiply(x_PK, w_GKN, ROWS["mixed"])
  exact = loop(x_PK.astype("float32"), w_GKN.astype("float32"), ROWS["mixed"])
  assert y_PN.dtype == "bfloat16"
  np.testing.assert_allclose(np.float32(y_PN), exact, rtol=2**-8, atol=1e-6)


def test_the_ragged_product_states_that_it_needs_a_tpu():
  x_PK, w_GKN = inputs(ROWS["mixed"])
  with pytest.raises(NotImplementedError, match="needs a TPU, the backend is cpu"):
    grouped_matmul(
      x_PK, w_GKN, jnp.array(ROWS["mixed"]), block_rows=BLOCK, implementation="pallas_tpu"
    )
