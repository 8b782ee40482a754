"""The Hopper kernel of the backward pass, interpreted on the CPU, against the reference in float32.

Interpret mode runs the roles, barriers and loops; the pieces of PTX are replaced by plain ones.

Legend: S queries, M entries, H heads, d head width, K chosen entries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops.sparse_attention import (
  hopper_backward,
  hopper_backward_plain,
  reduce_rows,
  reference,
)

M, WINDOW, ERROR = 80, 64, 5e-3
# Queries, K, chunk of queries, programs: several chunks and queries of a program; window only.
SIZES = [(5, 128, 3, 2), (3, 0, 3, 1)]


def case(queries: int, top_k: int):
  """Two documents, a query that sees nothing, blocks of choices: full, in part and empty."""
  rng = np.random.default_rng(queries)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  start_S = np.where(np.arange(queries) < queries // 2, 0, queries // 2)
  start_S[-1] = queries  # behind the query itself
  selection_SK = np.full((queries, top_k), -1, np.int32)
  for s, count in zip(range(queries - 1), (70, 0, 64, 9), strict=False):
    selection_SK[s, :count] = np.sort(rng.choice(M, count, replace=False))[:top_k]
  return (
    normal(queries, 64, 512), normal(queries, 512), normal(M, 512), jnp.asarray(selection_SK),
    jnp.asarray(start_S, jnp.int32), jnp.asarray(rng.normal(size=64), jnp.float32),
    normal(queries, 64, 512),
  )  # fmt: skip


def expected(q, window_kv, entry_kv, selection, start, sink, d_out):
  """Gradients of the reference in float32, and its lse and delta."""
  wide = [x.astype(jnp.float32)[None] for x in (q, window_kv, entry_kv, d_out)]

  def attend(q, window_kv, entry_kv):
    entries = (entry_kv, selection[None]) if selection.size else (None, None)
    return reference.sparse_attention(
      q, window_kv, *entries, start[None], sink, window=WINDOW, with_teacher=False
    )[:2]

  (out, lse), pull = jax.vjp(attend, *wide[:3])
  gradients = pull((wide[3], jnp.zeros_like(lse)))
  return [x[0] for x in gradients], lse[0], jnp.sum(out * wide[3], -1)[0]


@functools.cache
def run(queries: int, top_k: int, chunk: int, programs: int, detect_races: bool = False):
  """(got, wanted); rows that no query sees are NaN for the kernel."""
  arrays = case(queries, top_k)
  want, lse, delta = expected(*arrays)
  q, window_kv, entry_kv, selection, start, _, d_out = arrays
  chosen_M = np.isin(np.arange(M), np.asarray(selection))
  window_kv = window_kv.at[-1].set(jnp.nan)
  entry_kv = jnp.where(chosen_M[:, None], entry_kv, jnp.nan)
  inverse = None
  if top_k:
    inverse = reduce_rows.invert(selection, M, chunk=chunk, keys_per_query=top_k + WINDOW)
  else:
    entry_kv = selection = None
  got = hopper_backward.backward(
    q, window_kv, entry_kv, selection, jnp.maximum(start, jnp.arange(queries) - (WINDOW - 1)),
    inverse, lse, delta, d_out, window=WINDOW, chunk=chunk, programs=programs,
    pieces=hopper_backward_plain, interpret=plgpu.InterpretGPUParams(detect_races=detect_races),
  )  # fmt: skip
  return got, want


def error(got, want):
  return np.linalg.norm(np.float32(got) - np.float32(want)) / np.linalg.norm(np.float32(want))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_are_those_of_the_reference_and_unseen_rows_are_not_read(size):
  got, want = run(*size)
  assert [x.dtype for x in got if x is not None][:2] == [jnp.bfloat16, jnp.float32]
  assert (got[2] is None) == (size[1] == 0)
  for x, y in zip(got, want, strict=True):
    assert x is None or error(x, y) < ERROR


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_query_that_sees_nothing_and_rows_that_none_sees_get_exact_zeros(size):
  (d_q, d_window_kv, d_entry_kv), _ = run(*size)
  assert not np.any(d_q[-1]) and np.all(np.any(d_q[:-1] != 0, (1, 2)))
  assert not np.any(d_window_kv[-1])
  if d_entry_kv is not None:
    chosen_M = np.isin(np.arange(M), np.asarray(case(*size[:2])[3]))
    np.testing.assert_array_equal(np.any(np.asarray(d_entry_kv) != 0, -1), chosen_M)


def test_barriers_order_every_access_to_shared_memory_that_the_interpreter_follows(capsys):
  run(3, 64, 3, 1, detect_races=True)  # it does not follow the reads of S, dP and dQ
  assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize(
  ("heads", "width", "dtype", "window", "message"),
  [
    (32, 512, "bfloat16", 128, "32 heads of 512"),
    (64, 256, "bfloat16", 128, "64 heads of 256"),
    (64, 512, "float32", 128, "float32"),
    (64, 512, "bfloat16", 96, "96"),
  ],
)
def test_states_its_limits(heads, width, dtype, window, message):
  q, kv = jnp.ones((2, heads, width), dtype), jnp.ones((2, width), dtype)
  per_head, first = jnp.ones((2, heads)), jnp.zeros(2, jnp.int32)
  with pytest.raises(NotImplementedError, match=message):
    hopper_backward.backward(
      q, kv, None, None, first, None, per_head, per_head, q, window=window, chunk=2
    )  # fmt: skip
