"""Indexer scores in Pallas-Triton: of every visible entry, or of the members of a pool.

score[n] = sum_h w_h relu(q_h . k_n); the products of one head exist in registers only.

Legend: B rows, C queries of a chunk, I indexer heads, i indexer width, N entry cells, T queries of
a program, P keys of a program, W pool blocks of a query, V pool members (W blocks of entries).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from deepseek_jax.ops.indexer import tiles
from deepseek_jax.ops.indexer.scoring import head_term, rounding
from deepseek_jax.ops.triton_call import triton_call


def all_scores(
  q_BCIi, keys_BNi, weights_BIC, exists_BN, begin_BC, end_BC, *, scores_bf16: bool, tile
) -> jax.Array:
  """Scores of every visible entry; heads are added in ascending order, in float32, from 0.

  Args:
    q_BCIi, keys_BNi: of one dtype; C, N multiples of the tile, i a power of two.
    weights_BIC: float32.
    exists_BN: int32, 0 for holes.
    begin_BC, end_BC: int32, the visible range.
    scores_bf16: round after the product, the weight and the sum, as the released code.
    tile: tiles.ScoreTile.

  Returns: float32 [B, C, N]: minus infinity outside of the range and in holes; undefined in tiles
    of which no query sees an entry.
  """
  rows, queries = q_BCIi.shape[:2]
  entries = keys_BNi.shape[1]
  [scores_BCN] = triton_call(
    functools.partial(_all_scores, tile=tile, rounded=rounding(scores_bf16)),
    (q_BCIi, keys_BNi, weights_BIC, exists_BN, begin_BC, end_BC),
    [jax.ShapeDtypeStruct((rows, queries, entries), jnp.float32)],
    (queries // tile.queries, entries // tile.keys, rows),
    num_warps=tile.warps,
    num_stages=tile.stages,
  )
  return scores_BCN


def _all_scores(
  q_ref, keys_ref, weights_ref, exists_ref, begin_ref, end_ref, scores_ref, *, tile, rounded
):
  row = pl.program_id(2)
  first_query, first_key = pl.program_id(0) * tile.queries, pl.program_id(1) * tile.keys
  queries, keys = pl.ds(first_query, tile.queries), pl.ds(first_key, tile.keys)
  begin_T, end_T = begin_ref[row, queries], end_ref[row, queries]
  first = jnp.min(jnp.where(begin_T < end_T, begin_T, jnp.iinfo(jnp.int32).max))
  last = jnp.max(jnp.where(begin_T < end_T, end_T, 0))

  @pl.when((first_key < last) & (first_key + tile.keys > first))
  def _():
    key_Pi = keys_ref[row, keys, :]

    def add_head(h, total_TP):
      weight_T1 = weights_ref[row, h, queries][:, None]
      return total_TP + head_term(q_ref[row, queries, h, :], key_Pi, weight_T1, rounded)

    zero_TP = jnp.zeros((tile.queries, tile.keys), jnp.float32)
    total_TP = rounded(jax.lax.fori_loop(0, q_ref.shape[2], add_head, zero_TP))
    entry_1P = first_key + jnp.arange(tile.keys)[None]
    visible_TP = (entry_1P >= begin_T[:, None]) & (entry_1P < end_T[:, None])
    visible_TP &= (exists_ref[row, keys] > 0)[None]
    scores_ref[row, queries, keys] = jnp.where(visible_TP, total_TP, -jnp.inf)


def member_scores(
  q_BCIi, keys_BNi, weights_BCI, exists_BN, begin_BC, end_BC, pool_BCW, *, block, scores_bf16
) -> jax.Array:
  """Scores of the members of each query's pool; the order in which heads are added is Triton's.

  Args:
    q_BCIi, keys_BNi, exists_BN, begin_BC, end_BC: as for all_scores; I a power of two.
    weights_BCI: float32.
    pool_BCW: int32 block numbers from begin, ascending, -1 at the end.
    block: entries of a block, a power of two.

  Returns: float32 [B, C, W * block], minus infinity for what may not be seen; undefined behind the
    last block of the pool.
  """
  rows, queries = q_BCIi.shape[:2]
  blocks = pool_BCW.shape[2]
  tile = tiles.MEMBER_TILE
  [scores_BCV] = triton_call(
    functools.partial(
      _member_scores,
      part=max(1, tile.keys // block),
      block=block,
      rounded=rounding(scores_bf16),
    ),
    (q_BCIi, keys_BNi, weights_BCI, exists_BN, begin_BC, end_BC, pool_BCW),
    [jax.ShapeDtypeStruct((rows, queries, blocks * block), jnp.float32)],
    (queries, rows),
    num_warps=tile.warps,
    num_stages=tile.stages,
  )
  return scores_BCV


def _member_scores(
  q_ref,
  keys_ref,
  weights_ref,
  exists_ref,
  begin_ref,
  end_ref,
  pool_ref,
  scores_ref,
  *,
  part,
  block,
  rounded,
):
  row, query = pl.program_id(1), pl.program_id(0)
  begin, end = begin_ref[row, query], end_ref[row, query]
  q_Ii, weights_1I = q_ref[row, query, :, :], weights_ref[row, query, :][None]
  blocks, place_P = pool_ref.shape[2], jnp.arange(part * block)
  listed_W = jnp.arange(pl.next_power_of_2(blocks))
  pool_W = plt.load(pool_ref.at[row, query, listed_W], mask=listed_W < blocks, other=-1)
  live_blocks = jnp.sum(jnp.where(pool_W >= 0, 1, 0))
  channel_1i = jnp.arange(keys_ref.shape[2])[None]

  def score_part(number, _):
    listed_P = number * part + (place_P >> (block.bit_length() - 1))
    inside_P = listed_P < live_blocks
    number_P = plt.load(pool_ref.at[row, query, listed_P], mask=inside_P, other=0)
    entry_P = begin + number_P * block + (place_P & (block - 1))
    visible_P = inside_P & (entry_P < end)
    entry_P = jnp.where(visible_P, entry_P, 0)
    exists_P = plt.load(exists_ref.at[row, entry_P], mask=visible_P, other=0)
    key_Pi = plt.load(keys_ref.at[row, entry_P[:, None], channel_1i])
    score_P = rounded(jnp.sum(head_term(key_Pi, q_Ii, weights_1I, rounded), axis=1))
    plt.store(
      scores_ref.at[row, query, number * part * block + place_P],
      jnp.where(exists_P > 0, score_P, -jnp.inf),
      mask=inside_P,
    )

  jax.lax.fori_loop(0, (live_blocks + part - 1) // part, score_part, None)
