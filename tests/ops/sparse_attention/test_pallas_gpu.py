"""The Hopper back end behind the public op, interpreted: rows of a batch, plans, limits.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.sparse_attention import plan_selection, sparse_attention

B, Q, H, D, N, K, WINDOW = 2, 3, 64, 512, 9, 5, 128


def case():
  """Two documents in row 0, one and a padding slot in row 1, choices of every length."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  selection_BQK = np.full((B, Q, K), -1, np.int32)
  for place in np.ndindex(B, Q):
    count = rng.integers(0, K + 1)
    selection_BQK[place][:count] = np.sort(rng.choice(N, count, replace=False))
  selection_BQK[1, -1] = -1
  segment_start_BQ = np.array([[0, 1, 1], [0, 0, Q]], np.int32)
  sink_H = jnp.asarray(rng.normal(size=H), jnp.float32)
  return (
    normal(B, Q, H, D),
    normal(B, Q, D),
    normal(B, N, D),
    selection_BQK,
    segment_start_BQ,
    sink_H,
  )


def everything(implementation, dtype, *, planned):
  q, window_kv, entry_kv, selection, segment_start, sink = case()
  rng = np.random.default_rng(1)
  d_out, d_lse = rng.normal(size=q.shape), rng.normal(size=q.shape[:3])
  options = {"window": WINDOW, "implementation": implementation}

  def total(q, window_kv, entry_kv, sink):
    plan = plan_selection(selection, entry_kv, q, **options) if planned else None
    got = sparse_attention(
      q,
      window_kv,
      entry_kv,
      selection,
      segment_start,
      sink,
      plan=plan,
      with_teacher=True,
      **options,
    )
    return jnp.sum(got.out_BQHd * d_out) + jnp.sum(got.lse_BQH * d_lse), got

  floats = [x.astype(dtype) for x in (q, window_kv, entry_kv)]
  gradients, values = jax.grad(total, (0, 1, 2, 3), has_aux=True)(*floats, sink)
  return *values, *gradients


@pytest.mark.slow
def test_values_teacher_and_gradients_are_those_of_the_reference_with_and_without_a_plan():
  want = everything("reference", jnp.float32, planned=False)
  for planned in (True, False):
    got = everything("pallas_gpu", jnp.bfloat16, planned=planned)
    for x, y, bound in zip(got, want, [4e-3] * 3 + [1e-2] * 4, strict=True):
      x, y = np.float64(x), np.float64(y)
      assert np.linalg.norm(x - y) < bound * np.linalg.norm(y)


@pytest.mark.parametrize(
  ("heads", "dtype", "window"),
  [(32, jnp.bfloat16, 128), (64, jnp.float32, 128), (64, jnp.bfloat16, 64)],
)
def test_other_sizes_are_refused_with_their_values(heads, dtype, window):
  q = jnp.zeros((1, 1, heads, D), dtype)
  kv = jnp.zeros((1, 1, D), dtype)
  start, sink = jnp.zeros((1, 1), jnp.int32), jnp.zeros(heads)
  with pytest.raises(NotImplementedError, match=f"got {heads} of {D} in {q.dtype} and {window}"):
    sparse_attention(q, kv, None, None, start, sink, window=window, implementation="pallas_gpu")
