"""Sums of contribution rows against NumPy's, in interpret mode.

Legend: S queries, K chosen entries, M entry cells, d width, R contribution rows of a chunk.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.sparse_attention import reduce_rows

D, WINDOW = 16, 4


def selections(queries, top_k, entries, seed=0):
  """Ascending distinct ids, -1 at the end, some queries without any."""
  rng = np.random.default_rng(seed)
  selection_SK = np.full((queries, top_k), -1, np.int32)
  for ids_K in selection_SK:
    count = rng.integers(0, min(top_k, entries) + 1)
    ids_K[:count] = np.sort(rng.choice(entries, count, replace=False))
  return selection_SK


def summed(selection_SK, contributions_CRd, entries, *, chunk, keys_per_query):
  """Chunk after chunk through the kernels, starting from ones."""
  inverse = jax.jit(
    lambda ids: reduce_rows.invert(ids, entries, chunk=chunk, keys_per_query=keys_per_query)
  )(selection_SK)
  step = lambda acc, chunk: (reduce_rows.add_by_entry(chunk[0], chunk[1], acc), None)
  ones = jnp.ones((entries, contributions_CRd.shape[-1]), jnp.float32)
  return jax.jit(lambda *arrays: jax.lax.scan(step, ones, arrays)[0])(inverse, contributions_CRd)


def slowly(selection_SK, contributions_CRd, entries, *, chunk, keys_per_query):
  total = np.ones((entries, contributions_CRd.shape[-1]))
  for (t, k), entry in np.ndenumerate(selection_SK):
    if entry >= 0:
      total[entry] += contributions_CRd[t // chunk, t % chunk * keys_per_query + k]
  return total


@pytest.mark.parametrize(
  ("queries", "top_k", "entries", "chunk"),
  [(13, 4, 9, 4), (13, 4, 9, 13), (8, 3, 200, 4), (6, 5, 3, 8), (1, 1, 1, 1)],
)
def test_entries_get_the_sum_of_their_rows(queries, top_k, entries, chunk):
  selection_SK = selections(queries, top_k, entries)
  shape = (-(-queries // chunk), chunk * (top_k + WINDOW), D)
  contributions_CRd = np.random.default_rng(1).normal(size=shape).astype(np.float32)
  sizes = {"chunk": chunk, "keys_per_query": top_k + WINDOW}
  got = summed(selection_SK, contributions_CRd, entries, **sizes)
  want = slowly(selection_SK, contributions_CRd, entries, **sizes)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hot", [63, 64, 65, 128, 129, 300])
def test_lists_longer_than_a_piece_are_summed_whole(hot):
  selection_SK = np.full((300, 2), -1, np.int32)
  selection_SK[:hot, 0] = 2
  selection_SK[:, 1] = np.arange(300) % 3 + 3
  contributions_CRd = np.random.default_rng(hot).normal(size=(1, 600, D)).astype(np.float32)
  sizes = {"chunk": 300, "keys_per_query": 2}
  got = summed(selection_SK, contributions_CRd, 7, **sizes)
  want = slowly(selection_SK, contributions_CRd, 7, **sizes)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_no_program_sums_more_rows_than_a_piece():
  selection_SK = np.repeat(np.arange(5, dtype=np.int32)[None], 200, axis=0)
  inverse = reduce_rows.invert(jnp.asarray(selection_SK), 6, chunk=200, keys_per_query=5)
  lengths_P = np.array(inverse.piece_stop_CP - inverse.piece_start_CP)[0]
  number = int(inverse.piece_offsets_CN[0, -1])
  assert number == 5 * 3 and lengths_P.size == -(-1000 // reduce_rows.PIECE_ROWS)
  assert sum(lengths_P[:number]) == 1000 - 5 * reduce_rows.PIECE_ROWS
  assert max(lengths_P[:number]) <= reduce_rows.PIECE_ROWS and min(lengths_P[:number]) > 0


def test_rows_that_nobody_chose_are_not_read():
  selection_SK = np.array([[0, -1], [-1, -1], [0, 2]], np.int32)
  contributions_CRd = np.full((1, 3 * 2, D), np.nan, np.float32)
  contributions_CRd[0, [0, 4, 5]] = 1.0
  got = summed(selection_SK, contributions_CRd, 4, chunk=3, keys_per_query=2)
  np.testing.assert_array_equal(got[:, 0], [3, 1, 2, 1])


def test_a_selection_of_nothing_leaves_the_sum_as_it_was():
  selection_SK = np.zeros((3, 0), np.int32)
  got = summed(selection_SK, np.ones((1, 3 * WINDOW, D), np.float32), 4, chunk=3, keys_per_query=4)
  np.testing.assert_array_equal(got, np.ones((4, D)))


def test_bfloat16_rows_are_summed_in_float32():
  selection_SK = np.zeros((100, 1), np.int32)
  contributions_CRd = jnp.full((1, 100, D), 1.0078125, jnp.bfloat16)
  got = summed(selection_SK, contributions_CRd, 1, chunk=100, keys_per_query=1)
  np.testing.assert_array_equal(got, np.full((1, D), 1 + 100 * 1.0078125))


@pytest.mark.parametrize(
  ("slots", "window", "chunk"), [(13, 4, 4), (13, 4, 13), (5, 8, 2), (7, 1, 3), (9, 3, 16)]
)
@pytest.mark.parametrize("first_key", [0, 2])
def test_slots_get_the_sum_over_the_windows_that_hold_them(slots, window, chunk, first_key):
  keys_per_query, chunks = first_key + window, -(-slots // chunk)
  rng = np.random.default_rng(0)
  contributions_CRd = rng.normal(size=(chunks, chunk * keys_per_query, D)).astype(np.float32)
  contributions_CRd[-1, (slots - chunk * (chunks - 1)) * keys_per_query :] = np.nan  # no queries
  want = np.ones((slots, D))
  for t in range(slots):
    for i in range(window):
      if (slot := t - window + 1 + i) >= 0:
        want[slot] += contributions_CRd[t // chunk, t % chunk * keys_per_query + first_key + i]

  def step(acc_Sd, chunk_of):
    sizes = dict(window=window, chunk=chunk, keys_per_query=keys_per_query, first_key=first_key)
    return reduce_rows.add_window_band(chunk_of[0], chunk_of[1], acc_Sd, **sizes), None

  offset_C = jnp.arange(chunks, dtype=jnp.int32) * chunk
  ones_Sd = jnp.ones((slots, D), jnp.float32)
  got = jax.jit(lambda *a: jax.lax.scan(step, ones_Sd, a)[0])(offset_C, contributions_CRd)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
