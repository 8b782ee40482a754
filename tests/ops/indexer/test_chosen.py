"""The loss on chosen entries in bfloat16, its determinism, and what it does not allocate.

The kernel that sums key gradients is interpreted here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.indexer import divergence, tiles

QUERIES, HEADS, WIDTH, TOP_K = 40, 4, 16, 8
IMPLEMENTATIONS = ("xla", "pallas_gpu")


def case(entries, same_choice=False):
  """Two rows of bfloat16 arrays, choices with and without gaps, teachers, counting queries."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  q_BQIi, keys_BNi = normal(2, QUERIES, HEADS, WIDTH), normal(2, entries, WIDTH)
  weights_BQI = normal(2, QUERIES, HEADS) / 8
  draw = lambda: np.sort(rng.choice(entries, TOP_K, replace=False))
  selection_BQK = np.stack([[draw() for _ in range(QUERIES)] for _ in range(2)])
  if same_choice:
    selection_BQK[:] = selection_BQK[:1, :1]
  selection_BQK[:, ::5, 3:] = -1
  teacher_BQK = np.where(selection_BQK >= 0, rng.uniform(size=selection_BQK.shape), 0)
  counts_BQ = rng.uniform(size=(2, QUERIES)) < 0.9
  rest = jnp.asarray(selection_BQK, jnp.int32), jnp.asarray(teacher_BQK, jnp.float32), counts_BQ
  return (q_BQIi, keys_BNi, weights_BQI), rest


def gradients(implementation, arrays, rest):
  fn = lambda *arrays: divergence(*arrays, *rest, implementation=implementation)
  return jax.jit(jax.grad(fn, (0, 1, 2)))(*arrays)


@pytest.mark.parametrize("same_choice", [False, True], ids=["spread", "all choose the same"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_gradients_are_within_a_hundredth_of_float32_ones(
  implementation, same_choice, monkeypatch
):
  # 16 queries of each row at a time, then 8 are missing.
  monkeypatch.setattr(tiles, "DIVERGENCE_BYTES", 16 * 4 * 2 * TOP_K * WIDTH)
  arrays, rest = case(50, same_choice)
  want = gradients("reference", [x.astype(jnp.float32) for x in arrays], rest)
  for got, exact in zip(gradients(implementation, arrays, rest), want, strict=True):
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.float32(got) - exact) / np.linalg.norm(exact)
    assert error < 1e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_runs_give_the_same_bits(implementation):
  arrays, rest = case(50, same_choice=True)
  first, second = (gradients(implementation, arrays, rest) for _ in range(2))
  for x, y in zip(first, second, strict=True):
    np.testing.assert_array_equal(np.float32(x), np.float32(y))


def test_no_array_holds_scores_of_all_entries():
  entries = 20_000
  arrays, rest = case(entries)
  fn = functools.partial(divergence, implementation="xla")
  compiled = jax.jit(jax.grad(fn, (0, 1, 2))).lower(*arrays, *rest).compile()
  scores = 2 * QUERIES * entries * 4
  key_gradient = 2 * entries * WIDTH * 4
  assert compiled.memory_analysis().temp_size_in_bytes < scores / 2 + key_gradient
