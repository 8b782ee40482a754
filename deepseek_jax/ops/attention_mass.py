"""Where attention goes, looked at on a few queries of every row: a measurement without gradient.

Legend: B rows, Q slots, q sampled queries, H heads, d head width, N entry cells, K chosen entries,
W window, P pool blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.by_slots import Place, by_slots
from deepseek_jax.ops.indexer.reference import in_pool
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.membership import is_member

_LOWEST = -1e30  # stands in for minus infinity, so that no difference of infinities can arise


class AttentionMass(NamedTuple):
  """Sums over sampled queries that count, float32 []; shares are means over heads."""

  queries: jax.Array  # sampled queries that count
  sink: jax.Array  # share of the sink
  window: jax.Array  # share of the window; the chosen entries have the rest
  largest_logit: jax.Array  # no sum: of any query and head on any key that is attended to
  seeing: jax.Array  # sampled queries that count and see an entry
  recall: jax.Array  # what the chosen entries would have of all visible ones' mass, were all chosen
  pool_recall: jax.Array  # likewise the candidate pool; 1 where there is none


class Choice(NamedTuple):
  """Which entries a query sees, and which of them were chosen for it."""

  selection_BQK: jax.Array  # int32, -1 at the end
  begin_BQ: jax.Array  # int32, as in ops.indexer.Visible
  end_BQ: jax.Array
  pool_BQP: jax.Array | None  # int32 blocks, -1 at the end; None without a pool


class Queries(NamedTuple):
  """What belongs to a query slot."""

  q_BQHd: jax.Array
  window_kv_BQd: jax.Array
  segment_start_BQ: jax.Array  # int32
  counts_BQ: jax.Array  # bool
  choice: Choice | None = None  # None in a layer without entries


def attention_mass(
  queries: Queries,
  entry_kv_BNd: jax.Array | None,
  exists_BN: jax.Array | None,
  sink_H: jax.Array,
  *,
  window: int,
  samples: int,
  pool_block_size: int = 1,
) -> AttentionMass:
  """Shares of sink, window and entries, and how much of the entries' mass the selection catches.

  With a(X) = sum over heads of the softmax mass on the keys X, when window, sink and *all* visible
  entries compete: recall = a(chosen) / a(visible), pool_recall = a(pool) / a(visible). The shares
  of sink and window are those of attention as it is, where only chosen entries compete.

  Args:
    queries: see Queries; rotated queries and keys, as ops.sparse_attention takes them.
    entry_kv_BNd: compressed entries; None in a layer without them, and then exists_BN too.
    exists_BN: bool, cells that hold an entry.
    sink_H: float32 logit of the sink.
    window: slots, the query's own included.
    samples: queries looked at in a row, evenly spaced; all of them where it has fewer. All their
      logits, [B, samples, H, N] in float32, exist at a time, on a mesh the share of a device.
    pool_block_size: entries of a pool block.
  """
  queries = jax.lax.stop_gradient(queries)
  entry_kv_BNd, sink_H = jax.lax.stop_gradient((entry_kv_BNd, sink_H))
  every = max(1, queries.q_BQHd.shape[1] // samples)
  own = functools.partial(_own, window=window, every=every, block=pool_block_size)
  rows = (entry_kv_BNd, exists_BN)
  total = by_slots(
    own, queries, rows=rows, weights=[(sink_H, (None,))], dtype=jnp.float32, returns="pieces"
  )
  largest = jnp.max(total.largest_logit)
  return AttentionMass(*(jnp.sum(x) for x in total))._replace(largest_logit=largest)


def _own(place: Place, queries: Queries, rows, pieces, weights, *, window, every, block):
  """On one device: the sums as arrays [1]."""
  del pieces
  (entry_kv_BNd, exists_BN), (sink_H,) = rows, weights
  slots = queries.q_BQHd.shape[1]
  picked_q = np.arange(min(every, slots) - 1, slots, every)
  at = jax.tree.map(lambda x_BQ: x_BQ[:, picked_q], queries)
  window_BqHW = _window_logits(place, queries.window_kv_BQd, at, picked_q, window)
  near_BqH = jax.nn.logsumexp(window_BqHW, axis=-1)
  near_and_sink_BqH = jnp.logaddexp(near_BqH, sink_H)
  largest_Bq = jnp.max(window_BqHW, axis=(2, 3))
  chosen_BqH = all_BqH = pool_BqH = jnp.full_like(near_BqH, _LOWEST)
  if at.choice is not None:
    found = _entries(entry_kv_BNd, exists_BN, block, at.q_BQHd, at.choice)
    chosen_BqH, all_BqH, pool_BqH, most_BqH = found
    largest_Bq = jnp.maximum(largest_Bq, jnp.max(most_BqH, axis=2))

  served_BqH = jnp.logaddexp(near_and_sink_BqH, chosen_BqH)
  open_BqH = jnp.logaddexp(near_and_sink_BqH, all_BqH)
  mass_Bq = lambda x_BqH: jnp.sum(jnp.exp(x_BqH - open_BqH), axis=2)
  counts_Bq = at.counts_BQ
  sees_Bq = counts_Bq & jnp.any(all_BqH > _LOWEST / 2, axis=2)
  of_all_Bq = jnp.where(sees_Bq, mass_Bq(all_BqH), 1.0)
  total = lambda x_Bq, which_Bq: jnp.sum(jnp.where(which_Bq, x_Bq, 0.0))[None]
  share_Bq = lambda x_BqH: jnp.mean(jnp.exp(x_BqH - served_BqH), axis=2)
  return AttentionMass(
    queries=total(1.0, counts_Bq),
    sink=total(share_Bq(jnp.broadcast_to(sink_H, near_BqH.shape)), counts_Bq),
    window=total(share_Bq(near_BqH), counts_Bq),
    largest_logit=jnp.max(jnp.where(counts_Bq, largest_Bq, _LOWEST))[None],
    seeing=total(1.0, sees_Bq),
    recall=total(mass_Bq(chosen_BqH) / of_all_Bq, sees_Bq),
    pool_recall=total(mass_Bq(pool_BqH) / of_all_Bq, sees_Bq),
  )


def _window_logits(place: Place, kv_BQd, at: Queries, picked_q, window: int) -> jax.Array:
  """[B,q,H,W] float32."""
  near, slots = window - 1, kv_BQd.shape[1]
  before_BQd = place.with_halo(kv_BQd, near)
  if not place.halo(near):
    before_BQd = jnp.pad(kv_BQd, ((0, 0), (near, 0), (0, 0)))
  reach_qW = picked_q[:, None] + np.arange(window)
  logits = einsum_f32("bqhd,bqwd->bqhw", at.q_BQHd, before_BQd[:, reach_qW])
  slot_qW = place.begin(slots) + reach_qW - near
  seen_BqW = (slot_qW >= at.segment_start_BQ[..., None]) & (slot_qW >= 0)
  return jnp.where(seen_BqW[:, :, None], logits * at.q_BQHd.shape[-1] ** -0.5, _LOWEST)


def _entries(entry_kv_BNd, exists_BN, block: int, q_BqHd, at: Choice):
  """[B,q,H] each: log of the sums of exp(logit) over chosen, visible and pooled entries; the
  largest logit of a chosen one."""
  count = entry_kv_BNd.shape[1]
  logits_BqHN = einsum_f32("bqhd,bnd->bqhn", q_BqHd, entry_kv_BNd) * q_BqHd.shape[-1] ** -0.5
  entry_N = jnp.arange(count)
  inside_BqN = (entry_N >= at.begin_BQ[..., None]) & (entry_N < at.end_BQ[..., None])
  inside_BqN &= exists_BN[:, None]
  chosen_BqN = is_member(at.selection_BQK, count)
  pooled_BqN = inside_BqN
  if at.pool_BQP is not None:
    pooled_BqN &= in_pool(at.pool_BQP, at.begin_BQ, entry_N, block)
  only = lambda which_BqN: jnp.where(which_BqN[:, :, None], logits_BqHN, _LOWEST)
  sums = [jax.nn.logsumexp(only(which), axis=-1) for which in (chosen_BqN, inside_BqN, pooled_BqN)]
  return *sums, jnp.max(only(chosen_BqN), axis=-1)
