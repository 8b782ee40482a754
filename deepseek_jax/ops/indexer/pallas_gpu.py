"""The indexer's choice on GPUs: a chunk of queries is scored, then its best entries are taken.

Scores of a chunk are the only large temporary; their size does not depend on context times queries.

What equals what: heads are added in ascending order in float32, multiply and add perhaps fused. Ids
are those of the reference whenever products and sums are exact in float32; otherwise a score may
differ in its last bits, and ids where scores lie that close. Two runs agree bit for bit.

Legend: B rows, Q queries, C queries of a chunk, I indexer heads, i indexer width, N entry cells, K
chosen entries, W pool blocks, R = B C, G blocks of a
row.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.indexer import tiles, triton_choose, triton_scores


def select(
  q_BQIi,
  keys_BNi,
  head_weights_BQI,
  visible,
  choice,
  *,
  pool_BQW=None,
  with_scores: bool = False,
  score_tile: tiles.ScoreTile | None = None,
):
  """As the public op, of any sizes. with_scores is what the reference is for."""
  if with_scores:
    raise NotImplementedError("the kernel does not return scores")
  if choice.block_size & (choice.block_size - 1):
    raise NotImplementedError(f"block_size is {choice.block_size}, the kernel takes powers of two")
  score_tile = score_tile or tiles.score_tile(q_BQIi.shape[1])
  rows, entries, _ = keys_BNi.shape
  chosen = min(choice.top_k, entries)
  if not entries or not choice.top_k or (pool_BQW is not None and not pool_BQW.shape[2]):
    raise NotImplementedError("there is nothing to choose from, or nothing to choose")
  members = 0 if pool_BQW is None else pool_BQW.shape[2] * choice.block_size
  members_first = members > 0 and tiles.scores_members("pallas_gpu", entries, members)
  dtype = jnp.promote_types(q_BQIi.dtype, keys_BNi.dtype)
  q_BQIi = _fill_to_power(q_BQIi.astype(dtype), 3)
  keys_BNi = _fill_to_power(keys_BNi.astype(dtype), 2)
  weights_BQI = head_weights_BQI.astype(jnp.float32)
  if members_first:  # there a matrix product has all heads of a query on one side
    q_BQIi, weights_BQI = _fill_to_power(q_BQIi, 2), _fill_to_power(weights_BQI, 2)
  fill = -entries % score_tile.keys
  keys_BNi = jnp.pad(keys_BNi, ((0, 0), (0, fill), (0, 0)))
  exists_BN = jnp.pad(visible.exists_BN.astype(jnp.int32), ((0, 0), (0, fill)))
  width = members if members_first else entries + fill
  chunk = tiles.query_chunk(4 * rows * width, tiles.SCORE_BYTES)
  chunk = max(score_tile.queries, min(chunk, pl.next_power_of_2(q_BQIi.shape[1])))
  body = functools.partial(
    _choose_chunk,
    keys_BNi=keys_BNi,
    exists_BN=exists_BN,
    choice=choice,
    chosen=chosen,
    entries=entries,
    members_first=members_first,
    score_tile=score_tile,
  )
  queries = (q_BQIi, weights_BQI, visible.begin_BQ, visible.end_BQ, pool_BQW)
  selection_BQK, pool_BQW = over_queries(body, queries, chunk)
  return selection_BQK, pool_BQW, None


def _fill_to_power(x, axis: int):
  """Zeros up to a power of two of at least 16, which is what Triton's matrix products take."""
  fill = [(0, 0)] * x.ndim
  fill[axis] = (0, max(16, pl.next_power_of_2(x.shape[axis])) - x.shape[axis])
  return jnp.pad(x, fill)


def _choose_chunk(
  start, queries, *, keys_BNi, exists_BN, choice, chosen, entries, members_first, score_tile
):
  del start
  length = queries[0].shape[1]
  fill = -length % score_tile.queries  # with queries that see nothing
  pad = lambda x: jnp.pad(x, [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2))
  q_BCIi, weights_BCI, begin_BC, end_BC, pool_BCW = jax.tree.map(pad, queries)
  rows = q_BCIi.shape[0]
  join = lambda x_BC: x_BC.reshape(-1, *x_BC.shape[2:])
  split = lambda x_R: x_R.reshape(rows, -1, *x_R.shape[1:])[:, :length]
  begin_R, end_R = join(begin_BC), join(end_BC)

  if members_first:
    scores_BCV = triton_scores.member_scores(
      q_BCIi,
      keys_BNi,
      weights_BCI,
      exists_BN,
      begin_BC,
      end_BC,
      pool_BCW,
      block=choice.block_size,
      scores_bf16=choice.scores_bf16,
    )
    return split(_members(join(scores_BCV), begin_R, join(pool_BCW), choice, chosen)), None

  scores_BCN = triton_scores.all_scores(
    q_BCIi,
    keys_BNi,
    jnp.swapaxes(weights_BCI, 1, 2),
    exists_BN,
    begin_BC,
    end_BC,
    scores_bf16=choice.scores_bf16,
    tile=score_tile,
  )
  scores_RN, block = join(scores_BCN), choice.block_size
  published_BCW = None
  if choice.publish_blocks:
    blocks = min(choice.publish_blocks, -(-entries // block))
    published_BCW = split(_best_blocks(scores_RN, begin_R, end_R, block, blocks))
  if pool_BCW is None:
    selection_RK = triton_choose.top_ids(scores_RN, begin_R, end_R, chosen)
  else:
    selection_RK = triton_choose.members(
      scores_RN, begin_R, end_R, join(pool_BCW), block=block, count=chosen
    )
  return split(selection_RK), published_BCW


def _best_blocks(scores_RN, begin_R, end_R, block: int, count: int):
  maxima_RG = triton_choose.block_maxima(scores_RN, begin_R, end_R, block=block, pin_newest=True)
  blocks_R = triton_choose.block_count(begin_R, end_R, block)
  return triton_choose.top_ids(maxima_RG, jnp.zeros_like(begin_R), blocks_R, count)


def _members(scores_RV, begin_R, pool_RW, choice, chosen: int):
  """The best of each query's pool members, as entry ids: ascending, since blocks ascend."""
  block = choice.block_size
  members_R = block * jnp.sum(pool_RW >= 0, axis=1, dtype=jnp.int32)
  place_RK = triton_choose.top_ids(scores_RV, jnp.zeros_like(begin_R), members_R, chosen)
  number_RK = jnp.take_along_axis(pool_RW, jnp.maximum(place_RK, 0) // block, axis=1)
  id_RK = begin_R[:, None] + number_RK * block + place_RK % block
  return jnp.where(place_RK >= 0, id_RK, -1)
