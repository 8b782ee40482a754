"""Both ways to add rows by number agree. Legend: N, C rows, F channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.add_rows import add_rows
from tests.thinned import rest_slow

# Narrower than a piece of the kernel, and several pieces of different powers of two.
WIDTHS = [16, 48, 1536]


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("implementation", ["reference", "pallas_triton"])
@pytest.mark.parametrize("width", rest_slow(WIDTHS, 1))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_add_up_at_their_places_in_float32(implementation, width, dtype):
  rng = np.random.default_rng(0)
  place_C = rng.integers(-1, 5, 150).astype(np.int32)
  place_C[:80] = 6  # one list that several programs share, one row without any
  rows_CF = jax.random.normal(jax.random.key(0), (150, width)).astype(dtype)
  acc_NF = jax.random.normal(jax.random.key(1), (7, width))
  got = jax.jit(add_rows, static_argnames="implementation")(
    acc_NF, place_C, rows_CF, implementation=implementation
  )
  want = np.float64(acc_NF)
  np.add.at(want, place_C[place_C >= 0], np.float64(rows_CF.astype(jnp.float32))[place_C >= 0])
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(got[5], acc_NF[5])
