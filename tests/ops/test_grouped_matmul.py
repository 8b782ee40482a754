"""Grouped products against a loop. Legend: P rows, G groups, K input width, N output width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.grouped_matmul import grouped_matmul, xla
from tests.thinned import rest_slow

ROWS = {
  "mixed": (8, 0, 16, 4),
  "one group": (0, 40, 0, 0),
  "none": (0, 0, 0, 0),
  "full": (8, 8, 8, 24),
}
P, K, N, BLOCK = 48, 5, 6, 4
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}


@pytest.fixture(params=["reference", "xla copies", "xla loop"])
def implementation(request, monkeypatch):
  if request.param == "xla loop":
    monkeypatch.setattr(xla, "_COPIED_BYTES", 0)
  return request.param.split()[0]


def inputs(rows, sizes=(P, K, N), dtype="float32"):
  """x and w, and a cotangent whose rows past the last group are zero, as x's are."""
  rows_total, width_in, width_out = sizes
  keys = jax.random.split(jax.random.key(0), 3)
  used_P1 = np.arange(rows_total)[:, None] < sum(rows)
  x_PK = jnp.where(used_P1, jax.random.normal(keys[0], (rows_total, width_in), dtype), 0)
  d_y_PN = jnp.where(used_P1, jax.random.normal(keys[2], (rows_total, width_out), dtype), 0)
  return x_PK, jax.random.normal(keys[1], (len(rows), width_in, width_out), dtype), d_y_PN


def value_and_gradients(implementation, block_rows, rows, x_PK, w_GKN, d_y_PN):
  def run(x_PK, w_GKN, group_rows_G, d_y_PN):
    multiply = lambda x, w: grouped_matmul(
      x, w, group_rows_G, block_rows=block_rows, implementation=implementation
    )
    y_PN, gradients = jax.vjp(multiply, x_PK, w_GKN)
    return y_PN, *gradients(d_y_PN)

  return jax.jit(run)(x_PK, w_GKN, jnp.array(rows, jnp.int32), d_y_PN)


def loop(rows, x_PK, w_GKN, d_y_PN):
  """The same three in float64, one group after the other."""
  x_PK, w_GKN, d_y_PN = (np.asarray(array).astype(np.float64) for array in (x_PK, w_GKN, d_y_PN))
  y_PN, d_x_PK, d_w_GKN = np.zeros(d_y_PN.shape), np.zeros(x_PK.shape), np.zeros(w_GKN.shape)
  for group, end in enumerate(np.cumsum(rows)):
    own = slice(end - rows[group], end)
    y_PN[own] = x_PK[own] @ w_GKN[group]
    d_x_PK[own] = d_y_PN[own] @ w_GKN[group].T
    d_w_GKN[group] = x_PK[own].T @ d_y_PN[own]
  return y_PN, d_x_PK, d_w_GKN


def assert_close(got, want, dtype):
  for g, w in zip(got, want, strict=True):
    assert g.dtype == dtype
    error = np.linalg.norm(np.float64(g) - w)
    assert error <= TOLERANCE[dtype] * np.linalg.norm(w)


@pytest.mark.parametrize("load", rest_slow(ROWS, 2))
@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_rows_meet_their_group_s_matrix_in_value_and_gradient(load, dtype, implementation):
  rows, arrays = ROWS[load], inputs(ROWS[load], dtype=dtype)
  got = value_and_gradients(implementation, BLOCK, rows, *arrays)
  assert_close(got, loop(rows, *arrays), dtype)


def test_bfloat16_products_add_up_in_float32(implementation):
  """One large and 511 small products: bfloat16 would lose the small ones, in y and in d_w."""
  x_PK = jnp.full((512, 512), 2**-9, jnp.bfloat16).at[:, 0].set(1).at[0].set(1)
  w_GKN = jnp.full((1, 512, 1), 1, jnp.bfloat16)
  arrays = x_PK, w_GKN, jnp.ones((512, 1), jnp.bfloat16)
  got = value_and_gradients(implementation, 8, (512,), *arrays)
  for g, w in zip(got, loop((512,), *arrays), strict=True):
    np.testing.assert_allclose(np.float64(g), w, rtol=2**-8)


def test_the_loop_holds_one_copy_of_a_matrix_and_no_more_than_one_gradient():
  groups, width, rows = 64, 512, 2048
  w_GKN = jax.ShapeDtypeStruct((groups, width, width), jnp.float32)
  x_PK = jax.ShapeDtypeStruct((rows, width), jnp.float32)

  def temporary_bytes(implementation):
    def loss(x_PK, w_GKN):
      group_rows_G = jnp.full(groups, rows // groups, jnp.int32)
      y_PN = grouped_matmul(x_PK, w_GKN, group_rows_G, block_rows=8, implementation=implementation)
      return jnp.sum(y_PN**2)

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x_PK, w_GKN).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  copies = rows // 8 * width * width * 4
  assert temporary_bytes("reference") >= copies
  assert temporary_bytes("xla") < copies / 8


@pytest.mark.parametrize(
  ("rows", "sizes"),
  [((64, 0, 128, 64), (384, 128, 256)), ((192, 64), (256, 256, 128))],
  ids=["empty group and spare rows", "full"],
)
def test_the_hopper_kernel_interpreted_is_the_loop(rows, sizes):
  arrays = inputs(rows, sizes, "bfloat16")
  got = value_and_gradients("pallas_gpu", 64, rows, *arrays)
  assert_close(got, loop(rows, *arrays), "bfloat16")


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    ({"dtype": "float32"}, "takes bfloat16, got float32"),
    ({"block_rows": 32}, "blocks of 64, 128, ... rows, got 32"),
    ({"sizes": (128, 96, 128)}, "widths of 128, 256"),
  ],
)
def test_the_hopper_kernel_states_its_limits(change, reason):
  case = {"dtype": "bfloat16", "sizes": (128, 128, 128), "block_rows": 64, **change}
  arrays = inputs((64, 64), case["sizes"], case["dtype"])
  with pytest.raises(NotImplementedError, match=reason):
    value_and_gradients("pallas_gpu", case["block_rows"], (64, 64), *arrays)


def test_the_ragged_product_states_that_it_needs_a_tpu():
  with pytest.raises(NotImplementedError, match="needs a TPU, the backend is cpu"):
    value_and_gradients("ragged_dot", BLOCK, ROWS["mixed"], *inputs(ROWS["mixed"]))
