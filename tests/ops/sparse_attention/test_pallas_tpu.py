"""Sparse attention of the TPU, interpreted, against the reference in float32.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.sparse_attention import (
  pallas_tpu,
  reference,
  tpu_backward,
  tpu_forward,
  tpu_plan,
)
from deepseek_jax.ops.sparse_attention.tpu_plan import Chip

WINDOW = 8  # the interpreter knows no registers; on a TPU it must be 128
BLOCK = 2 * WINDOW
ROOMY = Chip(cores=1, vmem=2**26, tile=4)
# Relative errors against float32, Frobenius norm: bfloat16's rounding twice over; sums of float32.
TOLERANCE = {"float32": (2e-6, 2e-6), "bfloat16": (4e-3, 1e-2)}


def case(rows, queries, entries, top_k, heads, width, dtype="float32", seed=0):
  """Two documents a row, neighbours that share half a selection, choices of every length, none at
  all; two queries at the end of the last row see nothing of their window."""
  rng = np.random.default_rng(seed)
  selection_BQK = np.full((rows, queries, top_k), -1, np.int32)
  for b in range(rows):
    before = rng.permutation(entries)[:top_k]
    for t in range(queries):
      kept = before[rng.random(len(before)) < 0.5]
      taken = np.concatenate([kept, np.setdiff1d(rng.permutation(entries), kept)])
      before = rng.permutation(taken[:top_k])
      count = {0: 0, queries // 2: 0}.get(t, rng.integers(0, top_k + 1) if t % 7 == 3 else top_k)
      chosen = np.sort(before[:count])
      selection_BQK[b, t, : len(chosen)] = chosen
  start_Q = np.where(np.arange(queries) < queries // 3, 0, queries // 3)
  segment_start_BQ = np.tile(start_Q, (rows, 1))
  segment_start_BQ[-1, -2:] = [queries - 1, queries]
  selection_BQK[-1, -2:] = -1
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  arrays = (
    normal(rows, queries, heads, width),
    normal(rows, queries, width),
    normal(rows, entries, width),
    jnp.asarray(selection_BQK),
    jnp.asarray(segment_start_BQ, jnp.int32),
    jnp.asarray(rng.normal(size=heads), jnp.float32),
  )
  return arrays, normal(rows, queries, heads, width)


def wanted(arrays, d_out):
  """out, lse, teacher and the gradients of q, window and entries, by the reference in float32."""
  q, window_kv, entry_kv, selection, segment_start, sink = arrays
  wide = [jnp.asarray(x, jnp.float32) for x in (q, window_kv, entry_kv)]

  def attend(q, window_kv, entry_kv):
    return reference.sparse_attention(
      q, window_kv, entry_kv, selection, segment_start, sink, window=WINDOW, with_teacher=True
    )

  (out, lse, teacher), pull = jax.vjp(attend, *wide)
  zero = jnp.zeros_like
  return out, lse, teacher, pull((d_out.astype(jnp.float32), zero(lse), zero(teacher)))


@functools.partial(jax.jit, static_argnames=("chip",))
def both_passes(arrays, d_out, chip=ROOMY):
  """out, lse and the gradients of q, window and entries, by the kernels."""
  q, window_kv, entry_kv, selection, segment_start, _ = arrays
  plan = None
  if entry_kv is not None:
    plan = pallas_tpu.plan(selection, entry_kv.shape[1], window=WINDOW, chip=chip)
  out, lse = pallas_tpu.forward(*arrays, plan, window=WINDOW, chip=chip)
  delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
  gradients = pallas_tpu.backward(
    q, window_kv, entry_kv, selection, segment_start, plan, lse, delta, d_out,
    window=WINDOW, chip=chip,
  )  # fmt: skip
  return out, lse, gradients


def distance(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_close(got, want, dtype):
  (out, lse, gradients), (want_out, want_lse, _, want_gradients) = got, want
  of_value, of_gradient = TOLERANCE[dtype]
  assert distance(out, want_out) <= of_value
  assert distance(lse, want_lse) <= 2e-6
  for gradient, want_gradient in zip(gradients, want_gradients, strict=True):
    assert distance(gradient, want_gradient) <= of_gradient


@pytest.mark.parametrize(
  ("rows", "queries", "tile", "cores", "dtype", "width"),
  [
    (2, 29, 4, 1, "float32", 128),  # queries that do not fill a window block
    pytest.param(1, 24, 1, 1, "float32", 128, marks=pytest.mark.slow),
    pytest.param(1, 29, 2, 2, "float32", 256, marks=pytest.mark.slow),
    pytest.param(2, 61, 8, 2, "bfloat16", 256, marks=pytest.mark.slow),
  ],
)
def test_values_and_gradients_are_those_of_the_reference(rows, queries, tile, cores, dtype, width):
  arrays, d_out = case(rows, queries, 96, 12, 2, width, dtype)
  chip = ROOMY._replace(tile=tile, cores=cores)
  assert_close(both_passes(arrays, d_out, chip), wanted(arrays, d_out), dtype)


@pytest.mark.slow
def test_a_table_that_does_not_fit_goes_in_chunks_with_the_same_result():
  arrays, d_out = case(2, 29, 96, 12, 2, 128)
  sizes = tpu_forward.Sizes(
    rows=2, cores=1, tiles=8, tile=4, heads=2, width=128, window=WINDOW, blocks=3, block=BLOCK,
    entries=0,
  )  # fmt: skip
  of_40_entries = 40 * 128 * (4 + 4)
  tight = ROOMY._replace(vmem=tpu_backward.vmem_bytes(sizes, itemsize=4) + of_40_entries)
  traced = str(jax.make_jaxpr(lambda *a: both_passes(a, d_out, tight))(*arrays))
  assert traced.count("name=sparse_attention_backward") == 3  # 96 entries, 40 at a time
  assert_close(both_passes(arrays, d_out, tight), wanted(arrays, d_out), "float32")


def test_without_entries_it_is_windowed_attention_with_a_sink():
  arrays, d_out = case(2, 29, 8, 4, 2, 128)
  q, window_kv, entry_kv, selection, segment_start, sink = arrays
  nothing = jnp.full_like(selection, -1)
  want = wanted((q, window_kv, entry_kv, nothing, segment_start, sink), d_out)
  out, lse, gradients = both_passes(
    (q, window_kv, None, None, segment_start, sink), d_out, ROOMY._replace(cores=2)
  )
  assert distance(out, want[0]) <= 2e-6 and distance(lse, want[1]) <= 2e-6
  assert distance(gradients[0], want[3][0]) <= 2e-6 and distance(gradients[1], want[3][1]) <= 2e-6
  assert gradients[2] is None


@pytest.mark.slow
def test_no_entry_cells_and_no_choices_are_the_window_alone():
  arrays, d_out = case(1, 24, 8, 4, 2, 128)
  q, window_kv, entry_kv, selection, segment_start, sink = arrays
  alone = both_passes((q, window_kv, None, None, segment_start, sink), d_out, ROOMY)
  for entries, choice in [(entry_kv[:, :0], selection * 0 - 1), (entry_kv, selection[..., :0])]:
    out, lse, gradients = both_passes(
      (q, window_kv, entries, choice, segment_start, sink), d_out, ROOMY
    )
    np.testing.assert_array_equal(out, alone[0])
    np.testing.assert_array_equal(lse, alone[1])
    assert gradients[2].shape == entries.shape and not np.any(gradients[2])


def test_a_query_that_sees_nothing_gives_zero_and_the_sink_and_passes_no_gradient():
  arrays, d_out = case(2, 29, 96, 12, 2, 128)
  out, lse, (d_q, _, _) = both_passes(arrays, d_out, ROOMY)
  assert not np.any(out[-1, -2:]) and not np.any(d_q[-1, -2:])
  np.testing.assert_allclose(lse[-1, -2:], np.tile(arrays[-1], (2, 1)), rtol=1e-6)
  assert np.all(np.any(out[:, :-2], axis=-1))


@pytest.mark.slow
def test_two_runs_are_equal_bit_for_bit_and_do_not_depend_on_other_rows():
  arrays, d_out = case(2, 29, 96, 12, 2, 128)
  first, second = both_passes(arrays, d_out, ROOMY), both_passes(arrays, d_out, ROOMY)
  jax.tree.map(np.testing.assert_array_equal, first, second)
  alone = both_passes((*(x[1:] for x in arrays[:5]), arrays[5]), d_out[1:], ROOMY)
  own_row = jax.tree.map(lambda x: x[1:], first)
  jax.tree.map(np.testing.assert_array_equal, own_row, alone)


@pytest.mark.parametrize("size", [50.0, 1e4])
def test_large_scores_stay_finite_in_value_and_gradient(size):
  (q, *rest), d_out = case(2, 29, 96, 12, 2, 128)
  results = both_passes((q * size, *rest), d_out)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


def test_the_teacher_is_that_of_the_reference():
  arrays, d_out = case(2, 29, 96, 12, 2, 128)
  q, _, entry_kv, selection = arrays[:4]
  _, lse, teacher, _ = wanted(arrays, d_out)
  got = pallas_tpu.teacher(q, entry_kv, selection, lse)
  np.testing.assert_allclose(got, teacher, atol=1e-6)
  assert not np.any(got[selection < 0])


def test_a_list_has_every_chosen_entry_of_its_tile_once_with_a_bit_for_each_query():
  (_, _, _, selection, _, _), _ = case(2, 64, 96, 12, 1, 128)
  tile = 4
  plan = tpu_plan.make(selection, tile, BLOCK)
  for b in range(2):
    for g in range(64 // tile):
      queries = [set(map(int, row)) - {-1} for row in selection[b, g * tile : (g + 1) * tile]]
      union = sorted(set().union(*queries))
      length = len(union)
      assert plan.length_BG[b, g] == length
      assert plan.entry_BGJR[b, g].reshape(-1)[:length].tolist() == union
      bits = [sum((e in chosen) << t for t, chosen in enumerate(queries)) for e in union]
      assert plan.chosen_by_BGJR[b, g].reshape(-1)[:length].tolist() == bits
      assert not np.any(plan.chosen_by_BGJR[b, g].reshape(-1)[length:])


def test_chunks_of_a_list_hold_every_entry_once():
  (_, _, _, selection, _, _), _ = case(1, 64, 96, 12, 1, 128)
  plan = tpu_plan.make(selection, 4, BLOCK)
  visited = np.zeros(96, int)
  for begin in range(0, 96, 40):
    span = tpu_plan.cut(plan, begin, begin + 40, spare=40)
    for g in range(16):
      blocks = slice(int(span.first_BG[0, g]), int(span.first_BG[0, g] + span.blocks_BG[0, g]))
      assert blocks.stop <= plan.entry_BGJR.shape[2]
      rows, bits = span.row_BGJR[0, g, blocks], span.chosen_by_BGJR[0, g, blocks]
      assert np.all((rows == 40) == (bits == 0))
      np.add.at(visited, begin + np.asarray(rows[bits != 0]), 1)
  want = [np.unique(s[s >= 0]) for s in np.split(np.asarray(selection[0]), 16)]
  np.testing.assert_array_equal(visited, np.bincount(np.concatenate(want), minlength=96))


@pytest.mark.parametrize(
  ("width", "dtype", "window", "word"),
  [(128, "bfloat16", 128, "width"), (64, "float32", 128, "width"), (256, "bfloat16", 64, "window"),
   (256, "float16", 128, "float16")],
)  # fmt: skip
def test_limits_are_stated(width, dtype, window, word):
  with pytest.raises(NotImplementedError, match=word):
    pallas_tpu.require(jnp.zeros((1, 1, 16, width), dtype), window)
