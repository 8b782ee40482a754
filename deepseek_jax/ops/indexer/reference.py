"""The indexer in plain JAX, a chunk of queries at a time.

Legend: B rows, Q queries, C queries of a chunk, I indexer heads, i indexer width, N entry cells,
K chosen entries, G pool blocks of a document, W chosen pool blocks.
"""

import functools

import jax
import jax.numpy as jnp

from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.membership import is_member

QUERY_CHUNK = 512  # bounds the products to [B, 512, I, N]
_NEGATIVE = -jnp.inf


def select(
  q_BQIi, keys_BNi, head_weights_BQI, visible, choice, *, pool_BQW=None, with_scores=False
):
  body = functools.partial(
    _select_chunk,
    keys_BNi=keys_BNi,
    exists_BN=visible.exists_BN,
    choice=choice,
    with_scores=with_scores,
  )
  queries = (q_BQIi, head_weights_BQI, visible.begin_BQ, visible.end_BQ, pool_BQW)
  return over_queries(body, queries, QUERY_CHUNK)


def _select_chunk(start, queries, *, keys_BNi, exists_BN, choice, with_scores):
  del start
  q_BCIi, weights_BCI, begin_BC, end_BC, pool_BCW = queries
  scores_BCN = scores(q_BCIi, keys_BNi, weights_BCI, choice.scores_bf16)
  entry_N = jnp.arange(keys_BNi.shape[1])
  inside_BCN = (entry_N >= begin_BC[..., None]) & (entry_N < end_BC[..., None])
  scores_BCN = jnp.where(inside_BCN & exists_BN[:, None], scores_BCN, _NEGATIVE)
  allowed_BCN = scores_BCN
  if pool_BCW is not None:
    member_BCN = in_pool(pool_BCW, begin_BC, entry_N, choice.block_size)
    allowed_BCN = jnp.where(member_BCN, scores_BCN, _NEGATIVE)
  selection_BCK = top_ids(allowed_BCN, choice.top_k)
  published_BCW = None
  if choice.publish_blocks:
    published_BCW = best_blocks(scores_BCN, begin_BC, end_BC, choice)
  return selection_BCK, published_BCW, scores_BCN if with_scores else None


def scores(
  q_BCIi, keys_BNi, weights_BCI, scores_bf16: bool = False, *, products: str = "bcji,bni->bcjn"
):
  """sum_h w_h relu(q_h . k_n) in float32; with scores_bf16 rounded at three places, as released.

  With other products, "bcji,bcni->bcjn", every query has its own keys.
  """
  # A cast there and back is dropped by the compiler; reduce_precision to bfloat16's bits is not.
  rounded = (lambda x: jax.lax.reduce_precision(x, 8, 7)) if scores_bf16 else lambda x: x
  product_BCIN = einsum_f32(products, q_BCIi, keys_BNi)
  active_BCIN = jax.nn.relu(rounded(product_BCIN))
  weighted_BCIN = rounded(active_BCIN * weights_BCI.astype(jnp.float32)[..., None])
  return rounded(jnp.sum(weighted_BCIN, axis=2))


def top_ids(scores_BCN, count: int):
  """Ids of the `count` best finite scores, ascending, -1 at the end; ties go to the lowest id."""
  size = scores_BCN.shape[-1]
  best, ids = jax.lax.top_k(scores_BCN, min(count, size))
  ids = jnp.sort(jnp.where(best > _NEGATIVE, ids, size), axis=-1)
  return jnp.where(ids < size, ids, -1).astype(jnp.int32)


def best_blocks(scores_BCN, begin_BC, end_BC, choice):
  """Ids of the pool blocks, counted from the document's first entry."""
  block, size = choice.block_size, scores_BCN.shape[-1]
  # Bring each document's first entry to position 0, so that no block spans two documents.
  shifted = begin_BC[..., None] + jnp.arange(-(-size // block) * block)
  own_BCN = jnp.take_along_axis(scores_BCN, jnp.minimum(shifted, size - 1), axis=-1)
  own_BCN = jnp.where(shifted < size, own_BCN, _NEGATIVE)
  best_BCG = jnp.max(own_BCN.reshape(*own_BCN.shape[:-1], -1, block), axis=-1)
  newest_BC = (end_BC - begin_BC - 1) // block  # -1, no block, where nothing is visible
  pinned_BCG = jnp.arange(best_BCG.shape[-1]) == newest_BC[..., None]
  return top_ids(jnp.where(pinned_BCG, jnp.inf, best_BCG), choice.publish_blocks)


def in_pool(pool_BCW, begin_BC, entry_N, block: int):
  """[B,C,N] whether an entry's block is one of the pool's."""
  member_BCG = is_member(pool_BCW, -(-len(entry_N) // block))
  block_BCN = (entry_N - begin_BC[..., None]) // block
  member_BCN = jnp.take_along_axis(member_BCG, jnp.maximum(block_BCN, 0), axis=-1)
  return member_BCN & (block_BCN >= 0)


def divergence(q_BQIi, keys_BNi, head_weights_BQI, selection_BQK, teacher_BQK, counts_BQ):
  body = functools.partial(_divergence_chunk, keys_BNi=keys_BNi.astype(jnp.float32))
  q32, w32 = q_BQIi.astype(jnp.float32), head_weights_BQI.astype(jnp.float32)
  per_query_BQ = over_queries(body, (q32, w32, selection_BQK, teacher_BQK), QUERY_CHUNK)
  return jnp.sum(jnp.where(counts_BQ, per_query_BQ, 0.0))


def _divergence_chunk(start, queries, *, keys_BNi):
  del start
  q_BCIi, weights_BCI, selection_BCK, teacher_BCK = queries
  scores_BCN = scores(q_BCIi, keys_BNi, weights_BCI, scores_bf16=False)
  scores_BCK = jnp.take_along_axis(scores_BCN, jnp.maximum(selection_BCK, 0), axis=-1)
  return kl_from_scores(scores_BCK, selection_BCK, teacher_BCK)


def kl_from_scores(scores_BCK, selection_BCK, teacher_BCK):
  """[B,C] KL(teacher || softmax of scores) over the chosen entries."""
  chosen_BCK = selection_BCK >= 0
  scores_BCK = jnp.where(chosen_BCK, scores_BCK, -1e30)
  log_student_BCK = jax.nn.log_softmax(scores_BCK, axis=-1)
  total_BC1 = jnp.sum(teacher_BCK, axis=-1, keepdims=True)
  share_BCK = jnp.where(chosen_BCK, teacher_BCK / jnp.maximum(total_BC1, 1e-30), 0.0)
  log_share_BCK = jnp.log(jnp.maximum(share_BCK, 1e-30))
  return jnp.sum(share_BCK * jnp.where(chosen_BCK, log_share_BCK - log_student_BCK, 0.0), axis=-1)
