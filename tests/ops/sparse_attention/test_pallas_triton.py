"""The portable GPU back end, interpreted, against the reference: values, teacher and gradients.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.sparse_attention import pallas_triton, reference, tiles, vjp
from tests.thinned import rest_slow

B, D = 2, 16


def case(queries=13, heads=3, entries=9, top_k=4, seed=0):
  """Two documents a row, padding at the end of row 1, choices of every length, empty ones too."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  segment_start_BQ = np.where(np.arange(queries) < queries // 3, 0, queries // 3) * np.ones((B, 1))
  selection_BQK = np.full((B, queries, top_k), -1, np.int32)
  for place in np.ndindex(B, queries):
    count = rng.integers(0, min(top_k, entries) + 1)
    selection_BQK[place][:count] = np.sort(rng.choice(entries, count, replace=False))
  if queries > 4:
    segment_start_BQ[1, -2:] = np.arange(queries - 1, queries + 1)  # the last one sees nothing
    selection_BQK[1, -2:] = -1
  return (
    normal(B, queries, heads, D), normal(B, queries, D), normal(B, entries, D), selection_BQK,
    segment_start_BQ.astype(np.int32), normal(heads),
  )  # fmt: skip


def everything(attend, arrays):
  """Values, then gradients of q, window_kv, entry_kv and sink for fixed cotangents."""
  q, window_kv, entry_kv, selection, segment_start, sink = arrays
  rng = np.random.default_rng(7)
  d_out, d_lse = rng.normal(size=q.shape), rng.normal(size=q.shape[:3])

  def total(q, window_kv, entry_kv, sink):
    out, lse, teacher = attend(q, window_kv, entry_kv, selection, segment_start, sink)
    return jnp.sum(out * d_out) + jnp.sum(lse * d_lse), (out, lse, teacher)

  argnums = (0, 1, 3) if entry_kv is None else (0, 1, 2, 3)
  slopes = jax.jit(jax.grad(total, argnums, has_aux=True))
  gradients, values = slopes(q, window_kv, entry_kv, sink)
  return *(x for x in values if x is not None), *gradients


def both(arrays, window, with_teacher=True):
  """What the kernels and what the reference give."""
  options = {"window": window, "with_teacher": with_teacher}
  kernels = lambda *a: vjp.attend(pallas_triton, *a, plan=None, **options)
  plainly = lambda *a: reference.sparse_attention(*a, **options)
  return everything(kernels, arrays), everything(plainly, arrays)


def distance(got, want):
  """Relative Frobenius norm."""
  got, want = np.float64(got), np.float64(want)
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def assert_same(got, want, tolerance=2e-6):
  assert len(got) == len(want)
  for x, y in zip(got, want, strict=True):
    assert x.shape == y.shape and x.dtype == y.dtype
    assert distance(x, y) < tolerance


@pytest.mark.parametrize(
  ("queries", "window", "chunk"),
  rest_slow([(13, 4, 5), (1, 4, 2048), (13, 4, 2048), (5, 8, 3), (40, 20, 16)], 2),
)
def test_values_and_gradients_are_those_of_the_reference(queries, window, chunk, monkeypatch):
  keys = 2 * tiles.KEYS  # a block of chosen ones and one of the window
  monkeypatch.setattr(tiles, "BACKWARD_ROWS", chunk * keys)
  assert_same(*both(case(queries), window))


def test_selections_and_windows_of_several_blocks(monkeypatch):
  monkeypatch.setattr(tiles, "KEYS", 16)
  assert_same(*both(case(queries=40, entries=60, top_k=50), window=35))


@pytest.mark.slow
def test_heads_of_several_blocks(monkeypatch):
  monkeypatch.setattr(tiles, "KEYS", 16)
  monkeypatch.setattr(tiles, "BACKWARD_ROWS", 4 * 2 * 16)
  assert_same(*both(case(queries=5, heads=40), window=4))


def test_an_entry_that_every_query_chooses(monkeypatch):
  queries = 90
  arrays = list(case(queries, entries=5))
  arrays[3] = np.broadcast_to(np.array([1, 3, 4, -1], np.int32), (B, queries, 4))
  assert_same(*both(arrays, window=4))


def test_without_entries_it_is_windowed_attention():
  q, window_kv, _, _, segment_start, sink = case()
  assert_same(*both((q, window_kv, None, None, segment_start, sink), 4, with_teacher=False))


@pytest.mark.parametrize(("entries", "top_k"), [(0, 4), (9, 0)])
def test_nothing_to_choose_from_gives_windowed_attention_and_no_teacher(entries, top_k):
  arrays = case(entries=entries, top_k=top_k)
  out, lse, teacher, d_q, d_window_kv, d_entry_kv, d_sink = everything(
    lambda *a: vjp.attend(pallas_triton, *a, window=4, plan=None, with_teacher=True), arrays
  )
  assert teacher.shape == (B, 13, top_k) and not np.any(teacher)
  assert d_entry_kv.shape == (B, entries, D) and not np.any(d_entry_kv)
  window_only = lambda q, kv, entry_kv, selection, segment_start, sink: reference.sparse_attention(
    q, kv, None, None, segment_start, sink, window=4, with_teacher=False
  )
  want = everything(window_only, (*arrays[:2], None, None, *arrays[4:]))
  assert_same((out, lse, d_q, d_window_kv, d_sink), want)


def test_a_query_that_sees_nothing_gives_zero_and_passes_zero_gradients():
  (out, lse, teacher, d_q, *_), _ = both(case(), window=4)
  assert not np.any(out[1, -1]) and not np.any(teacher[1, -1]) and not np.any(d_q[1, -1])
  np.testing.assert_allclose(lse[1, -1], case()[-1], rtol=1e-6)  # the sink alone


def test_large_scores_stay_finite():
  q, *rest = case()
  for x in both((q * 1e4, *rest), window=4)[0]:
    assert np.isfinite(x).all()


def test_bfloat16_is_within_its_rounding_of_float32():
  arrays = case(queries=8, entries=20, top_k=10)
  narrow = [jnp.asarray(x, "bfloat16") for x in arrays[:3]]
  kernels = lambda *a: vjp.attend(pallas_triton, *a, window=4, plan=None, with_teacher=True)
  got = everything(kernels, (*narrow, *arrays[3:]))
  plainly = lambda *a: reference.sparse_attention(*a, window=4, with_teacher=True)
  want = everything(plainly, (*(np.float32(x) for x in narrow), *arrays[3:]))
  assert got[0].dtype == got[3].dtype == "bfloat16" and got[1].dtype == jnp.float32
  # The gradients also differ by the rounding of out, which delta is made of.
  for x, y, tolerance in zip(got, want, (4e-3, 1e-5, 1e-5, *[1e-2] * 4), strict=True):
    assert distance(x, y) < tolerance


@pytest.mark.parametrize(
  ("shape", "dtype"), [((1, 2, 16, 24), "float32"), ((1, 2, 16, 8), "float32"),
                       ((1, 2, 16, 32), "float16"), ((1, 2, 16, 1 << 14), "float32")]
)  # fmt: skip
def test_what_the_kernels_cannot_take_is_refused(shape, dtype):
  with pytest.raises(NotImplementedError, match=r"head width is|q is float16"):
    jax.eval_shape(lambda: pallas_triton.require(jnp.zeros(shape, dtype), window=4))
