"""Rows of a table, none for -1. Legend: X tokens, R rows of a token, h channels."""

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.ops.table_lookup import table_lookup

TABLE = jax.random.normal(jax.random.key(0), (7, 3))
ROWS_XR = np.array([[0, 6], [-1, 2], [2, 2], [-1, -1]], np.int32)


def test_rows_are_read_and_minus_one_reads_zeros():
  read = table_lookup(TABLE, ROWS_XR, "bfloat16")
  want = np.where((ROWS_XR >= 0)[..., None], np.asarray(TABLE)[ROWS_XR], 0)
  np.testing.assert_array_equal(read, want.astype(jnp.bfloat16))
  assert read.dtype == "bfloat16"


def test_gradients_add_up_per_row_and_minus_one_gives_none():
  d_XRh = np.arange(1, 25, dtype=np.float32).reshape(4, 2, 3)
  d_table = jax.vjp(lambda t: table_lookup(t, ROWS_XR, "float32"), TABLE)[1](d_XRh)[0]
  want = np.zeros((7, 3), np.float32)
  for x, r in zip(*np.nonzero(ROWS_XR >= 0), strict=True):
    want[ROWS_XR[x, r]] += d_XRh[x, r]
  np.testing.assert_array_equal(d_table, want)
