"""The indexer's choice in plain JAX, arranged for memory: runs anywhere, the kernels' baseline.

Products exist for a chunk of queries and a block of keys at a time; a restricted layer gathers its
pool's members where that is less work than scoring everything.

Legend: B rows, Q queries, C queries of a chunk, I indexer heads, i indexer width, N entry cells, K
chosen entries, W pool blocks, V pool members, P keys of a block, n blocks of keys.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.indexer import reference, tiles
from deepseek_jax.ops.table_lookup import take_own

_NEGATIVE = -jnp.inf


def select(
  q_BQIi, keys_BNi, head_weights_BQI, visible, choice, *, pool_BQW=None, with_scores: bool = False
):
  """As the public op."""
  return select_by(
    _masked_scores,
    "xla",
    (q_BQIi, keys_BNi, head_weights_BQI),
    visible,
    choice,
    pool_BQW=pool_BQW,
    with_scores=with_scores,
  )


def select_by(score: Callable, name: str, arrays, visible, choice, *, pool_BQW, with_scores: bool):
  """The op with a function for the scores of all entries.

  Args:
    score: (q_BCIi, keys_BNi, weights_BCI, exists_BN, begin_BC, end_BC, scores_bf16) -> float32
      [B,C,N], minus infinity where an entry may not be seen.
    name: which implementation that is, for tiles.scores_members.
    arrays: queries, keys and head weights; the rest as for the public op.
  """
  if with_scores:
    raise NotImplementedError("only the reference returns scores")
  q_BQIi, keys_BNi, weights_BQI = arrays
  rows, entries, width = keys_BNi.shape
  members = 0 if pool_BQW is None else pool_BQW.shape[2] * choice.block_size
  if members and tiles.scores_members(name, entries, members):
    per_member = 4 * q_BQIi.shape[2] + width * keys_BNi.dtype.itemsize  # a product per head, a key
    chunk = max(1, tiles.PRODUCT_BYTES // (rows * members * per_member))
    body = functools.partial(_choose_among_members, choice=choice)
  else:
    chunk = tiles.query_chunk(_SORT_COPIES * 4 * rows * entries, tiles.SCORE_BYTES)
    body = functools.partial(_choose, choice=choice, score=score)
  body = functools.partial(body, keys_BNi=keys_BNi, exists_BN=visible.exists_BN)
  queries = (q_BQIi, weights_BQI, visible.begin_BQ, visible.end_BQ, pool_BQW)
  return *over_queries(body, queries, chunk), None


_SORT_COPIES = 3  # jax.lax.top_k takes two to three times its input (read off compiled programs)


def _choose(start, queries, *, keys_BNi, exists_BN, choice, score):
  del start
  q_BCIi, weights_BCI, begin_BC, end_BC, pool_BCW = queries
  scores_BCN = score(q_BCIi, keys_BNi, weights_BCI, exists_BN, begin_BC, end_BC, choice.scores_bf16)
  published_BCW = None
  if choice.publish_blocks:
    published_BCW = reference.best_blocks(scores_BCN, begin_BC, end_BC, choice)
  if pool_BCW is None:
    return reference.top_ids(scores_BCN, choice.top_k), published_BCW
  id_BCV = member_ids(pool_BCW, begin_BC, end_BC, choice.block_size)
  scores_BCV = jnp.take_along_axis(scores_BCN, jnp.maximum(id_BCV, 0), axis=-1)
  return _top_members(scores_BCV, id_BCV, choice.top_k, keys_BNi.shape[1]), published_BCW


def _choose_among_members(start, queries, *, keys_BNi, exists_BN, choice):
  del start
  q_BCIi, weights_BCI, begin_BC, end_BC, pool_BCW = queries
  id_BCV = member_ids(pool_BCW, begin_BC, end_BC, choice.block_size)
  exists_BCV = take_own(exists_BN, id_BCV)
  scores_BCV = reference.scores(
    q_BCIi, take_own(keys_BNi, id_BCV), weights_BCI, choice.scores_bf16, products="bcji,bcni->bcjn"
  )
  scores_BCV = jnp.where(exists_BCV, scores_BCV, _NEGATIVE)
  return _top_members(scores_BCV, id_BCV, choice.top_k, keys_BNi.shape[1]), None


def member_ids(pool_BCW, begin_BC, end_BC, block: int):
  """[B,C,V] entry ids of a pool's members, ascending; -1 for what is not visible."""
  number_BCV = jnp.repeat(pool_BCW, block, axis=-1)
  within_V = jnp.arange(number_BCV.shape[-1], dtype=jnp.int32) % block
  id_BCV = begin_BC[..., None] + number_BCV * block + within_V
  return jnp.where((number_BCV >= 0) & (id_BCV < end_BC[..., None]), id_BCV, -1)


def _top_members(scores_BCV, id_BCV, count: int, entries: int):
  scores_BCV = jnp.where(id_BCV >= 0, scores_BCV, _NEGATIVE)
  place_BCK = reference.top_ids(scores_BCV, min(count, entries))
  id_BCK = jnp.take_along_axis(id_BCV, jnp.maximum(place_BCK, 0), axis=-1)
  fill = [(0, 0), (0, 0), (0, min(count, entries) - id_BCK.shape[-1])]
  return jnp.pad(jnp.where(place_BCK >= 0, id_BCK, -1), fill, constant_values=-1)


def _masked_scores(q_BCIi, keys_BNi, weights_BCI, exists_BN, begin_BC, end_BC, scores_bf16: bool):
  """Scores of all entries, one block of keys after the other."""
  rows, entries, width = keys_BNi.shape
  score = functools.partial(
    reference.scores, q_BCIi, weights_BCI=weights_BCI, scores_bf16=scores_bf16
  )
  per_key = 4 * q_BCIi.size // width  # one float32 product per row, query and head
  block = max(1, tiles.PRODUCT_BYTES // per_key)
  if block >= entries:
    scores_BCN = score(keys_BNi)
  else:
    count = -(-entries // block)
    keys_BNi = jnp.pad(keys_BNi, ((0, 0), (0, count * block - entries), (0, 0)))
    keys_nBPi = jnp.moveaxis(keys_BNi.reshape(rows, count, block, width), 1, 0)
    scores_nBCP = jax.lax.map(score, keys_nBPi)
    scores_BCN = jnp.moveaxis(scores_nBCP, 0, 2).reshape(*q_BCIi.shape[:2], -1)[..., :entries]
  entry_N = jnp.arange(entries)
  inside_BCN = (entry_N >= begin_BC[..., None]) & (entry_N < end_BC[..., None])
  return jnp.where(inside_BCN & exists_BN[:, None], scores_BCN, _NEGATIVE)
