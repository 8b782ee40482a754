"""The Hopper kernel of the forward pass, interpreted on the CPU, against the reference in float32.

Interpret mode runs the roles, the ring, the barriers and the arithmetic; pieces of PTX are replaced
by plain ones.

Legend: S queries of all rows, M entries, H = 64 heads, d = 512 channels, K chosen entries.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops.sparse_attention import hopper_forward, hopper_plain, reference
from tests.thinned import rest_slow

H, D, M = 64, 512, 150


def case(queries: int, top_k: int, seed=0):
  """Two documents, choices of every length, a query that sees nothing at all."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  selection_SK = np.full((queries, top_k), -1, np.int32)
  for s in range(queries):
    count = (min(top_k, M), 0, top_k // 3)[s % 3]
    selection_SK[s, :count] = np.sort(rng.choice(M, count, replace=False))
  start_S = np.where(np.arange(queries) < 2, 0, 2)
  selection_SK[-1], start_S[-1] = -1, queries + 5
  sink_H = rng.normal(size=H).astype(np.float32)
  return (
    normal(queries, H, D), normal(queries, D), normal(M, D), jnp.asarray(selection_SK),
    start_S.astype(np.int32), jnp.asarray(sink_H),
  )  # fmt: skip


@functools.cache
def run(queries: int, top_k: int, window: int, programs: int):
  """(out, lse) of the kernel, then of the reference in float32."""
  q, window_kv, entry_kv, selection, start_S, sink = case(queries, top_k)
  first_S = jnp.maximum(jnp.asarray(start_S), jnp.arange(queries) - (window - 1))
  kept = lambda x: x if top_k else None
  got = attend(
    q, window_kv, kept(entry_kv), kept(selection), first_S, sink, window, programs
  )  # fmt: skip
  wide = [x.astype(jnp.float32)[None] for x in (q, window_kv, entry_kv)]
  want = reference.sparse_attention(
    wide[0], wide[1], kept(wide[2]), kept(selection[None]), jnp.asarray(start_S)[None], sink,
    window=window, with_teacher=False,
  )  # fmt: skip
  return [np.asarray(x, np.float32) for x in got], [np.asarray(x[0]) for x in want[:2]]


def attend(q, window_kv, entry_kv, selection, first_S, sink, window, programs):
  return hopper_forward.forward(
    q, window_kv, entry_kv, selection, first_S, sink, window=window, programs=programs,
    pieces=hopper_plain, interpret=plgpu.InterpretGPUParams(),
  )  # fmt: skip


CASES = [
  (5, 128, 64, 2),  # a program with three queries and one with two, blocks of choices skipped
  (3, 64, 128, 3),  # a program for every query, a window of two blocks
  (3, 0, 128, 1),  # window only: the ring and the sums go round with two blocks a query
]


@pytest.mark.parametrize(("queries", "top_k", "window", "programs"), rest_slow(CASES[::-1], 1))
def test_output_and_denominator_are_those_of_the_reference(queries, top_k, window, programs):
  (out, lse), (want_out, want_lse) = run(queries, top_k, window, programs)
  assert np.linalg.norm(out - want_out) <= 4e-3 * np.linalg.norm(want_out)
  np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_a_query_that_sees_nothing_gives_zero_and_its_sink():
  (out, lse), _ = run(*CASES[0])
  np.testing.assert_array_equal(out[-1], 0)
  np.testing.assert_allclose(lse[-1], case(5, 128)[-1], atol=1e-6)


def test_a_selection_of_no_entries_is_window_only_attention():
  q, window_kv, entry_kv, selection, start_S, sink = case(3, 64)
  arrays = (q, window_kv, entry_kv[:0], jnp.full_like(selection, -1), jnp.asarray(start_S), sink)
  none = (q, window_kv, None, None, jnp.asarray(start_S), sink)
  for got, want in zip(attend(*arrays, 64, 1), attend(*none, 64, 1), strict=True):
    np.testing.assert_array_equal(np.float32(got), np.float32(want))


@pytest.mark.parametrize("size", [-3e38, 3e38])
def test_any_finite_sink_gives_finite_output(size):
  q, window_kv, _, _, start_S, _ = case(2, 0)
  sink = jnp.full(H, size, jnp.float32)
  out, lse = attend(q, window_kv, None, None, jnp.asarray(start_S), sink, 64, 1)
  assert np.isfinite(np.float32(out)).all() and np.isfinite(lse).all()
  seen = np.float32(out[0])  # the first query sees its own key alone
  want = np.float32(window_kv[0]) if size < 0 else np.zeros(D)
  np.testing.assert_allclose(seen, np.broadcast_to(want, (H, D)), atol=1e-2)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"q": jnp.zeros((2, 32, D), jnp.bfloat16)}, "32 heads of 512"),
    ({"q": jnp.zeros((2, H, 256), jnp.bfloat16)}, "64 heads of 256"),
    ({"q": jnp.zeros((2, H, D), jnp.float32)}, "q is float32"),
    ({"kv": jnp.zeros((2, D), jnp.float32)}, "kv is float32"),
    ({"window": 96}, "window is 96"),
    ({"window": 0}, "window is 0"),
  ],
)
def test_limits_are_stated(change, message):
  q, window_kv, _, _, start_S, sink = case(2, 0)
  arguments = {"q": q, "kv": window_kv, "window": 64} | change
  with pytest.raises(NotImplementedError, match=message):
    attend(
      arguments["q"], arguments["kv"], None, None, jnp.asarray(start_S), sink,
      arguments["window"], 1,
    )  # fmt: skip
