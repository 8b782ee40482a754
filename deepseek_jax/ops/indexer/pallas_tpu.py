"""The indexer's choice on TPUs: a kernel scores a chunk of queries, jax.lax.top_k takes the best.

A tile is computed transposed, [keys, queries]: a head's weights are then a row, which is cheap to
spread over the tile's sublanes, and the result is transposed once and not once per head
(read off the compiler's schedule). Heads are added in ascending order, in float32, from 0.

Legend: B rows, C queries of a chunk, I indexer heads, i indexer width, N entry cells, T queries of
a tile, P keys of a tile, S keys of a strip.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.ops.indexer import xla
from deepseek_jax.ops.indexer.scoring import head_term, rounding

_QUERIES, _KEYS = 128, 1024
_LANES = 128
# Rows of a tile that are summed over the heads at once: 32,768 float32 are 32 vector registers.
_STRIP = 2**15 // _QUERIES
_VMEM_BYTES = 32 * 2**20


def select(
  q_BQIi, keys_BNi, head_weights_BQI, visible, choice, *, pool_BQW=None, with_scores: bool = False
):
  """As the public op, of any sizes; interpreted where there is no TPU."""
  if not keys_BNi.shape[1]:
    raise NotImplementedError("there are no entries")
  return xla.select_by(
    _scores,
    "pallas_tpu",
    (q_BQIi, keys_BNi, head_weights_BQI),
    visible,
    choice,
    pool_BQW=pool_BQW,
    with_scores=with_scores,
  )


def _scores(q_BCIi, keys_BNi, weights_BCI, exists_BN, begin_BC, end_BC, scores_bf16: bool):
  """[B,C,N] float32, minus infinity where an entry may not be seen."""
  queries, entries = q_BCIi.shape[1], keys_BNi.shape[1]
  dtype = jnp.promote_types(q_BCIi.dtype, keys_BNi.dtype)
  q_BCIi = _fill(_fill(q_BCIi.astype(dtype), 1, _QUERIES), 3, _LANES)
  weights_BCI = _fill(weights_BCI.astype(jnp.float32), 1, _QUERIES)
  keys_BNi = _fill(_fill(keys_BNi.astype(dtype), 1, _KEYS), 2, _LANES)
  scores_BCN = _call(
    jnp.swapaxes(q_BCIi, 1, 2),
    keys_BNi,
    jnp.swapaxes(weights_BCI, 1, 2),
    _fill(exists_BN.astype(jnp.int32), 1, _KEYS)[..., None],
    _fill(begin_BC, 1, _QUERIES)[:, None],
    _fill(end_BC, 1, _QUERIES)[:, None],
    scores_bf16,
  )
  return scores_BCN[:, :queries, :entries]


def _fill(x, axis: int, multiple: int):
  """Zeros at the end of an axis up to a multiple; zeros change no score and see nothing."""
  fill = [(0, 0)] * x.ndim
  fill[axis] = (0, -x.shape[axis] % multiple)
  return jnp.pad(x, fill)


def _call(q_BICi, keys_BNi, weights_BIC, exists_BN1, begin_B1C, end_B1C, scores_bf16: bool):
  rows, heads, queries, width = q_BICi.shape
  entries = keys_BNi.shape[1]
  query_tiles, key_tiles = queries // _QUERIES, entries // _KEYS
  # First and one past the last entry that some query of a tile sees.
  sees_B1C = begin_B1C < end_B1C
  of_tiles = lambda x_B1C: x_B1C.reshape(rows * query_tiles, _QUERIES)
  first = jnp.min(of_tiles(jnp.where(sees_B1C, begin_B1C, entries)), axis=1)
  last = jnp.max(of_tiles(jnp.where(sees_B1C, end_B1C, 0)), axis=1)
  grid = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=2,
    grid=(rows, query_tiles, key_tiles),
    in_specs=[
      pl.BlockSpec((None, heads, _QUERIES, width), lambda b, t, p, *_: (b, 0, t, 0)),
      pl.BlockSpec((None, _KEYS, width), lambda b, t, p, *_: (b, p, 0)),
      pl.BlockSpec((None, heads, _QUERIES), lambda b, t, p, *_: (b, 0, t)),
      pl.BlockSpec((None, _KEYS, 1), lambda b, t, p, *_: (b, p, 0)),
      pl.BlockSpec((None, 1, _QUERIES), lambda b, t, p, *_: (b, 0, t)),
      pl.BlockSpec((None, 1, _QUERIES), lambda b, t, p, *_: (b, 0, t)),
    ],
    out_specs=pl.BlockSpec((None, _QUERIES, _KEYS), lambda b, t, p, *_: (b, t, p)),
    scratch_shapes=[pltpu.VMEM((_KEYS, _QUERIES), jnp.float32)],
  )
  return pl.pallas_call(
    functools.partial(_score_tile, scores_bf16=scores_bf16, query_tiles=query_tiles),
    grid_spec=grid,
    out_shape=jax.ShapeDtypeStruct((rows, queries, entries), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
    ),
    interpret=not pltpu.is_tpu_device(),
    name="indexer_scores",
  )(first, last, q_BICi, keys_BNi, weights_BIC, exists_BN1, begin_B1C, end_B1C)


def _score_tile(
  first_ref,
  last_ref,
  q_ref,
  keys_ref,
  weights_ref,
  exists_ref,
  begin_ref,
  end_ref,
  scores_ref,
  tile_ref,
  *,
  scores_bf16,
  query_tiles,
):
  tile = pl.program_id(0) * query_tiles + pl.program_id(1)
  first_key = pl.program_id(2) * _KEYS
  seen = (first_key < last_ref[tile]) & (first_key + _KEYS > first_ref[tile])
  rounded = rounding(scores_bf16)

  @pl.when(seen)
  def _():
    def score_strip(number, _):
      strip = pl.ds(pl.multiple_of(number * _STRIP, _STRIP), _STRIP)
      key_Si = keys_ref[strip, :]
      total_ST = jnp.zeros((_STRIP, _QUERIES), jnp.float32)
      for h in range(q_ref.shape[0]):
        total_ST += head_term(key_Si, q_ref[h], weights_ref[pl.ds(h, 1), :], rounded)
      row_ST = jax.lax.broadcasted_iota(jnp.int32, total_ST.shape, 0)
      entry_ST = first_key + number * _STRIP + row_ST
      visible_ST = (entry_ST >= begin_ref[...]) & (entry_ST < end_ref[...])
      visible_ST &= exists_ref[strip, :] > 0
      tile_ref[strip, :] = jnp.where(visible_ST, rounded(total_ST), -jnp.inf)
      return 0

    jax.lax.fori_loop(0, _KEYS // _STRIP, score_strip, 0)
    scores_ref[...] = tile_ref[...].T

  @pl.when(jnp.logical_not(seen))
  def _():
    scores_ref[...] = jnp.full_like(scores_ref, -jnp.inf)
