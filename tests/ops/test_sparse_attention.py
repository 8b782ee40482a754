"""Sparse attention against a loop over queries and keys in float64.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.layout import Document, build_layout
from deepseek_jax.ops.indexer import Choice, Visible, select
from deepseek_jax.ops.sparse_attention import plan_selection, reference, sparse_attention

B, H, D, N, K = 2, 3, 16, 9, 4
# Queries, window, chunk of queries: one chunk and several, cut unevenly, windows of every kind.
SIZES = [(13, 4, 512), (13, 4, 4), (12, 5, 6), (7, 1, 3), (5, 8, 2), (16, 4, 8), (1, 4, 4)]


def slowly(q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, sink_H, window):
  """(out, lse, probabilities of the choice summed over heads), model.md section 2.4."""
  rows, queries, heads, width = q_BQHd.shape
  out, lse = np.zeros(q_BQHd.shape), np.zeros((rows, queries, heads))
  teacher = np.zeros((rows, queries, 0 if selection_BQK is None else selection_BQK.shape[-1]))
  for b, t, h in itertools.product(range(rows), range(queries), range(heads)):
    first = max(segment_start_BQ[b, t], t - window + 1)
    keys = [window_kv_BQd[b, s] for s in range(first, t + 1)]
    chosen = (
      [] if selection_BQK is None else [(k, e) for k, e in enumerate(selection_BQK[b, t]) if e >= 0]
    )
    keys += [entry_kv_BNd[b, e] for _, e in chosen]
    scores = np.array([q_BQHd[b, t, h] @ key for key in keys]) / np.sqrt(width)
    lse[b, t, h] = np.log(np.exp(scores).sum() + np.exp(sink_H[h]))
    p = np.exp(scores - lse[b, t, h])
    out[b, t, h] = sum((w * key for w, key in zip(p, keys, strict=True)), np.zeros(width))
    for (k, _), w in zip(chosen, p[len(keys) - len(chosen) :], strict=True):
      teacher[b, t, k] += w
  return out, lse, teacher


def case(queries, seed=0):
  """Two documents a row, padding at the end of row 1, choices of every length, empty ones too."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  segment_start_BQ = np.where(np.arange(queries) < queries // 3, 0, queries // 3) * np.ones((B, 1))
  if queries > 4:
    segment_start_BQ[1, -2:] = np.arange(queries - 1, queries + 1)  # sees nothing in its window
  selection_BQK = np.full((B, queries, K), -1)
  for b, t in itertools.product(range(B), range(queries)):
    count = rng.integers(0, K + 1)
    selection_BQK[b, t, :count] = np.sort(rng.choice(N, count, replace=False))
  selection_BQK[1, -2:] = -1
  return (
    normal(B, queries, H, D), normal(B, queries, D), normal(B, N, D),
    selection_BQK.astype(np.int32), segment_start_BQ.astype(np.int32), normal(H),
  )  # fmt: skip


def attend(arrays, window, with_teacher=True):
  op = lambda *a: sparse_attention(
    *a, window=window, with_teacher=with_teacher, implementation="reference"
  )
  return jax.jit(op)(*arrays)


@pytest.mark.parametrize(("queries", "window", "chunk"), SIZES)
def test_output_denominator_and_teacher_are_those_of_the_loop(queries, window, chunk, monkeypatch):
  monkeypatch.setattr(reference, "QUERY_CHUNK", chunk)
  arrays = case(queries)
  for got, want in zip(attend(arrays, window), slowly(*arrays, window), strict=True):
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("chunk", [512, 4])
def test_without_entries_it_is_windowed_attention_with_a_sink(chunk, monkeypatch):
  monkeypatch.setattr(reference, "QUERY_CHUNK", chunk)
  q, window_kv, _, _, segment_start, sink = case(13)
  arrays = (q, window_kv, None, None, segment_start, sink)
  got = attend(arrays, 4, with_teacher=False)
  out, lse, _ = slowly(*arrays, 4)
  np.testing.assert_allclose(got.out_BQHd, out, atol=2e-6)
  np.testing.assert_allclose(got.lse_BQH, lse, atol=2e-6)
  assert got.teacher_BQK is None


@pytest.mark.parametrize("chunk", [512, 4])
def test_gradients_are_the_slopes_of_the_loop(chunk, monkeypatch):
  monkeypatch.setattr(reference, "QUERY_CHUNK", chunk)
  q, window_kv, entry_kv, selection, segment_start, sink = case(7)
  d_out = np.random.default_rng(1).normal(size=q.shape)

  def total(q, window_kv, entry_kv, sink):
    arrays = (q, window_kv, entry_kv, selection, segment_start, sink)
    return jnp.sum(attend(arrays, 4, with_teacher=False).out_BQHd * d_out)

  def slow_total(floats):
    q, window_kv, entry_kv, sink = floats
    return np.sum(slowly(q, window_kv, entry_kv, selection, segment_start, sink, 4)[0] * d_out)

  floats = [np.float64(x) for x in (q, window_kv, entry_kv, sink)]
  grads = jax.jit(jax.grad(total, range(4)))(q, window_kv, entry_kv, sink)
  rng, step = np.random.default_rng(2), 1e-5
  for number, grad in enumerate(grads):
    for _ in range(3):
      direction = rng.normal(size=grad.shape)
      moved = lambda sign, n=number, v=direction: [
        x + sign * step * v if i == n else x for i, x in enumerate(floats)
      ]
      slope = (slow_total(moved(1)) - slow_total(moved(-1))) / (2 * step)
      assert np.sum(grad * direction) == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_choosing_every_visible_entry_is_dense_causal_attention():
  """model.md section 8.7, on two documents with entries of two tokens."""
  slots, window = 14, 4
  layout = build_layout([Document(np.arange(5)), Document(np.arange(8))], slots=slots, ratios=(2,))
  rng = np.random.default_rng(3)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, window_kv, entry_kv, sink = (
    normal(1, slots, H, D),
    normal(1, slots, D),
    normal(1, 7, D),
    normal(H),
  )
  exists_BN = layout.entry_slots[2][..., -1] >= 0
  seen = Visible(exists_BN, layout.entry_begin[2], layout.entry_end[2])
  chosen = select(
    normal(1, slots, 1, D), normal(1, 7, D), normal(1, slots, 1), seen, Choice(top_k=7)
  )
  got = attend((q, window_kv, entry_kv, chosen.selection_BQK, layout.segment_start, sink), window)
  document, last = layout.document[0], layout.entry_slots[2][0, :, -1]
  slot = np.arange(slots)
  near = (slot <= slot[:, None]) & (slot > slot[:, None] - window)
  own = (document == document[:, None]) & (document >= 0)
  complete = exists_BN[0] & (last <= slot[:, None]) & (document[last] == document[:, None])
  mask = np.concatenate([near & own, complete], axis=1)
  keys = np.concatenate([window_kv[0], entry_kv[0]]).astype(np.float64)
  scores = np.einsum("qhd,nd->qhn", q[0], keys) / np.sqrt(D)
  power = np.exp(scores) * mask[:, None]
  want = power @ keys / (power.sum(-1, keepdims=True) + np.exp(sink)[:, None])
  np.testing.assert_allclose(got.out_BQHd[0], want, atol=2e-6)


def test_a_query_that_sees_nothing_gives_zero_and_passes_zero_gradients():
  arrays = case(13)
  seen_BQ1 = np.arange(13)[:, None] < np.array([[[13]], [[11]]])
  total = lambda q, kv: jnp.sum(attend((q, kv, *arrays[2:]), 4).out_BQHd ** 2)
  got = attend(arrays, 4)
  np.testing.assert_array_equal(np.any(got.out_BQHd != 0, -1), seen_BQ1 & np.ones(H, bool))
  np.testing.assert_allclose(got.lse_BQH[1, -1], arrays[-1], atol=1e-6)  # the sink alone
  d_q, d_kv = jax.grad(total, (0, 1))(*arrays[:2])
  np.testing.assert_array_equal(np.any(d_q != 0, -1), seen_BQ1 & np.ones(H, bool))
  assert np.isfinite(d_kv).all()


@pytest.mark.parametrize("size", [50.0, 1e4])
def test_large_scores_stay_finite_in_value_and_gradient(size):
  q, *rest = case(13)
  total = lambda q: jnp.sum(attend((q * size, *rest), 4).out_BQHd)
  value, d_q = jax.value_and_grad(total)(q)
  assert np.isfinite(value) and np.isfinite(d_q).all()


def test_the_teacher_has_no_gradient():
  q, *rest = case(13)
  d_q = jax.grad(lambda q: jnp.sum(attend((q, *rest), 4).teacher_BQK))(q)
  assert not np.any(d_q)


def test_bfloat16_output_is_within_its_rounding_of_float32():
  arrays = case(13)
  narrow = [jnp.asarray(x, "bfloat16") for x in arrays[:3]]
  wide = [np.float32(x) for x in narrow]
  got = attend((*narrow, *arrays[3:]), 4)
  want = slowly(*wide, *arrays[3:], 4)
  assert got.out_BQHd.dtype == "bfloat16" and got.lse_BQH.dtype == jnp.float32
  np.testing.assert_allclose(np.float32(got.out_BQHd), want[0], atol=2e-2)
  np.testing.assert_allclose(got.lse_BQH, want[1], atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "pallas_triton"])
def test_no_entry_cell_at_all_is_window_only_with_an_empty_teacher(implementation):
  q, window_kv, entry_kv, selection, segment_start, sink = case(5)
  options = {"window": 4, "implementation": implementation, "with_teacher": True}
  none = np.full_like(selection, -1)
  got = sparse_attention(q, window_kv, entry_kv[:, :0], none, segment_start, sink, **options)
  want = sparse_attention(q, window_kv, None, None, segment_start, sink, **options)
  np.testing.assert_array_equal(got.out_BQHd, want.out_BQHd)
  assert not np.any(got.teacher_BQK) and got.teacher_BQK.shape == (B, 5, K)
  assert want.teacher_BQK.shape == (B, 5, 0)


@pytest.mark.parametrize("implementation", ["reference", "pallas_triton"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sinks_leave_values_and_gradients_finite(implementation, sign):
  q, *rest, sink = case(5)
  sink = np.full_like(sink, sign * np.finfo(np.float32).max)

  def total(q):
    got = sparse_attention(q, *rest, sink, window=4, implementation=implementation)
    return jnp.sum(got.out_BQHd), got

  d_q, got = jax.grad(total, has_aux=True)(q)
  assert np.isfinite(d_q).all() and np.isfinite(got.lse_BQH).all()
  seen = np.any(np.asarray(got.out_BQHd) != 0, -1)
  assert not seen.any() if sign > 0 else seen[0].all()


@pytest.mark.parametrize("change", ["rows", "choices", "entries"])
def test_a_plan_of_other_arguments_is_refused(change):
  q, window_kv, entry_kv, selection, segment_start, sink = case(5)
  options = {"window": 4, "implementation": "pallas_triton"}
  other = {
    "rows": (selection[:1], entry_kv[:1], q[:1]),
    "choices": (np.pad(selection, ((0, 0), (0, 0), (0, 64)), constant_values=-1), entry_kv, q),
    "entries": (selection, np.pad(entry_kv, ((0, 0), (0, 3), (0, 0))), q),
  }[change]
  plan = plan_selection(*other, **options)
  with pytest.raises(ValueError, match="plan was made for another selection"):
    sparse_attention(q, window_kv, entry_kv, selection, segment_start, sink, plan=plan, **options)


def test_queries_and_keys_of_two_kinds_are_refused_by_a_kernel():
  q, window_kv, *rest = case(5)
  with pytest.raises(NotImplementedError, match="one dtype, got .'bfloat16', 'float32'."):
    sparse_attention(
      q, jnp.asarray(window_kv, "bfloat16"), *rest, window=4, implementation="pallas_triton"
    )


def test_a_window_of_nothing_is_refused():
  with pytest.raises(ValueError, match=r"window is 0, accepted are 1, 2"):
    sparse_attention(*case(5), window=0)
