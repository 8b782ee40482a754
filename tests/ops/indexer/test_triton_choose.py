"""Exact choice among hard values: ties, infinities, huge ranges, subnormals. Interpreted.

Legend: R rows, N values of a row, K chosen.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.indexer import tiles, triton_choose
from tests.thinned import rest_slow

ROWS, VALUES = 6, 150
TINY, HUGE = 1e-38, 3e38


def rows(kind):
  rng = np.random.default_rng(0)
  normal = rng.normal(size=(ROWS, VALUES))
  some = rng.random((ROWS, VALUES)) < 0.3
  values = {
    "normal": normal,
    "ties": np.round(normal),
    "all equal": np.zeros((ROWS, VALUES)),
    "with infinities": np.where(some, np.where(normal > 0, np.inf, -np.inf), normal),
    "hardly any": np.where(rng.random((ROWS, VALUES)) < 0.03, normal, -np.inf),
    "huge range": normal * np.where(some, HUGE / 5, TINY),
    "negative": -np.exp(10 * normal),
  }[kind]
  return jnp.asarray(values, jnp.float32)


KINDS = ["normal", "ties", "all equal", "with infinities", "hardly any", "huge range", "negative"]


def best(values_RN, begin_R, end_R, count):
  """Loop: best first, the lowest id first among equals; ids ascending, -1 at the end."""
  ids_RK = np.full((len(values_RN), count), -1)
  for row, (values_N, begin, end) in enumerate(zip(values_RN, begin_R, end_R, strict=True)):
    live = [n for n in range(begin, end) if values_N[n] > -np.inf]
    chosen = sorted(sorted(live, key=lambda n: (-values_N[n], n))[:count])
    ids_RK[row, : len(chosen)] = chosen
  return ids_RK


@functools.cache
def choose_seven(places):
  """The compiled choice with programs of at most `places`; compiled at its first call."""
  del places
  return jax.jit(lambda *arrays: triton_choose.top_ids(*arrays, 7))


@pytest.mark.parametrize("places", [8192, 20], ids=["direct", "three rounds"])
@pytest.mark.parametrize("kind", rest_slow(KINDS, 3))
def test_the_best_are_chosen_of_any_values_and_ties_go_to_the_lowest_id(kind, places, monkeypatch):
  monkeypatch.setattr(tiles, "DIRECT_PLACES", places)
  values_RN = rows(kind)
  begin_R = np.array([0, 3, 70, 149, 20, 0], np.int32)
  end_R = np.array([150, 147, 100, 150, 20, 1], np.int32)
  got_RK = choose_seven(places)(values_RN, begin_R, end_R)
  np.testing.assert_array_equal(got_RK, best(np.asarray(values_RN), begin_R, end_R, 7))


def test_values_outside_of_the_range_are_never_chosen():
  values_RN = jnp.full((2, 64), jnp.nan).at[:, 10:20].set(1.0)
  begin_R, end_R = jnp.array([10, 12]), jnp.array([20, 15])
  got_RK = triton_choose.top_ids(values_RN, begin_R, end_R, 4)
  np.testing.assert_array_equal(got_RK, [[10, 11, 12, 13], [12, 13, 14, -1]])


def test_too_many_candidates_for_one_program_are_refused():
  with pytest.raises(NotImplementedError, match="candidates"):
    triton_choose.top_ids(jnp.zeros((1, 40_000)), jnp.zeros(1, int), jnp.ones(1, int), 20_000)
