"""The indexer's loss on every entry that a query may choose, for a warm-up on short contexts.

In plain JAX, a chunk of queries at a time in both directions: cost grows with the square of the
context, memory with its length.

Legend: B rows, Q queries, C queries of a chunk, H heads, d head width, I indexer heads, i indexer
width, N entry cells, K chosen entries, W pool blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.indexer import reference, tiles
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.membership import is_member

_LOWEST = -1e30  # stands in for minus infinity, so that no difference of infinities can arise


class Teacher(NamedTuple):
  """The attention that an indexer learns from, without its entries."""

  q_BQHd: jax.Array  # rotated queries
  lse_BQH: jax.Array  # float32 log of the denominator with window, sink and chosen entries
  selection_BQK: jax.Array  # int32, the chosen entries, -1 at the end


class Support(NamedTuple):
  """Which entries a query may choose."""

  begin_BQ: jax.Array  # int32, as in Visible
  end_BQ: jax.Array
  pool_BQW: jax.Array | None  # int32 blocks, -1 at the end; None: all visible entries


def divergence(slots, rows, block: int) -> jax.Array:
  """Sum over counting queries, float32 [], as ops.indexer.dense_divergence.

  Args:
    slots: index queries, head weights, Teacher, Support, and which queries count.
    rows: index keys, entries, and which cells have one.
    block: entries of a pool block.
  """
  q_BQIi, weights_BQI, teacher, support, counts_BQ = slots
  keys_BNi, entry_kv_BNd, exists_BN = rows
  body = functools.partial(
    _chunk,
    keys_BNi=keys_BNi.astype(jnp.float32),  # so that their gradient is added up in float32
    entry_kv_BNd=entry_kv_BNd,
    exists_BN=exists_BN,
    block=block,
  )
  # The logits of all heads of attention are what is largest.
  batch, _, heads, _ = teacher.q_BQHd.shape
  chunk = max(1, tiles.SCORE_BYTES // (4 * batch * heads * keys_BNi.shape[1]))
  queries = (q_BQIi.astype(jnp.float32), weights_BQI, teacher, support)
  per_query_BQ = over_queries(body, queries, chunk)
  return jnp.sum(jnp.where(counts_BQ, per_query_BQ, 0.0))


def _chunk(start, queries, *, keys_BNi, entry_kv_BNd, exists_BN, block: int):
  del start
  q_BCIi, weights_BCI, teacher, support = queries
  entry_N = jnp.arange(keys_BNi.shape[1])
  may_BCN = (entry_N >= support.begin_BQ[..., None]) & (entry_N < support.end_BQ[..., None])
  may_BCN &= exists_BN[:, None]
  if support.pool_BQW is not None:
    may_BCN &= reference.in_pool(support.pool_BQW, support.begin_BQ, entry_N, block)
  mass_BCN = _mass(teacher, entry_kv_BNd, may_BCN)
  scores_BCN = reference.scores(q_BCIi, keys_BNi, weights_BCI)
  return reference.kl_from_scores(scores_BCN, jnp.where(may_BCN, 0, -1), mass_BCN)


def _mass(teacher: Teacher, entry_kv_BNd, may_BCN) -> jax.Array:
  """[B,C,N] softmax over window, sink and all entries of the support, summed over heads.

  Chosen entries are in the given denominator already, so only the others are added to it.
  """
  scale = teacher.q_BQHd.shape[-1] ** -0.5
  logits_BCHN = einsum_f32("bchd,bnd->bchn", teacher.q_BQHd, entry_kv_BNd) * scale
  chosen_BCN = is_member(teacher.selection_BQK, may_BCN.shape[-1])
  others_BCHN = jnp.where((may_BCN & ~chosen_BCN)[:, :, None], logits_BCHN, _LOWEST)
  lse_BCH = jnp.logaddexp(teacher.lse_BQH, jax.nn.logsumexp(others_BCHN, axis=-1))
  probability_BCHN = jnp.exp(logits_BCHN - lse_BCH[..., None])
  return jnp.sum(jnp.where(may_BCN[:, :, None], probability_BCHN, 0.0), axis=2)
