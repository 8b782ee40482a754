"""Sparse attention in plain JAX: every key is scored, and a mask keeps the visible ones.

Legend: B rows, Q queries, C queries of a chunk, H heads, d head width, N entry cells, K chosen
entries, W window keys in reach of a chunk.
"""

import functools

import jax
import jax.numpy as jnp

from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.membership import is_member

QUERY_CHUNK = 512  # bounds the scores to [B, 512, H, N]
_LOWEST = -1e30  # stands in for minus infinity, so that no difference of infinities can arise


def sparse_attention(
  q_BQHd,
  window_kv_BQd,
  entry_kv_BNd,
  selection_BQK,
  segment_start_BQ,
  sink_H,
  *,
  window: int,
  with_teacher: bool,
):
  whole = q_BQHd.shape[1] <= QUERY_CHUNK
  # Slots around the row, so that the first and the last chunk's window are slices like any other.
  padding, end = (0, 0) if whole else (window - 1, QUERY_CHUNK)
  keys_BWd = jnp.pad(window_kv_BQd, ((0, 0), (padding, end), (0, 0)))
  reach = window_kv_BQd.shape[1] if whole else QUERY_CHUNK + padding
  body = functools.partial(
    _chunk, keys_BWd=keys_BWd, entry_kv_BNd=entry_kv_BNd, sink_H=sink_H, window=window,
    reach=reach, padding=padding, with_teacher=with_teacher,
  )  # fmt: skip
  return over_queries(body, (q_BQHd, selection_BQK, segment_start_BQ), QUERY_CHUNK)


def _chunk(
  start, queries, *, keys_BWd, entry_kv_BNd, sink_H, window, reach, padding, with_teacher
):
  q_BCHd, selection_BCK, segment_start_BC = queries
  window_BWd = jax.lax.dynamic_slice_in_dim(keys_BWd, start, reach, axis=1)
  slot_C = start + jnp.arange(q_BCHd.shape[1])
  key_slot_W = start - padding + jnp.arange(reach)
  first_BC = jnp.maximum(segment_start_BC, slot_C - (window - 1))
  visible_BCW = (key_slot_W <= slot_C[:, None]) & (key_slot_W >= first_BC[..., None])
  window_BCHW = _scores(q_BCHd, window_BWd, visible_BCW)
  if entry_kv_BNd is None:
    entry_BCHN = window_BCHW[..., :0]
  else:
    chosen_BCN = is_member(selection_BCK, entry_kv_BNd.shape[1])
    entry_BCHN = _scores(q_BCHd, entry_kv_BNd, chosen_BCN)

  largest_BCH = jnp.maximum(
    jnp.maximum(jnp.max(window_BCHW, -1), jnp.max(entry_BCHN, -1, initial=_LOWEST)), sink_H
  )
  largest_BCH = jax.lax.stop_gradient(largest_BCH)
  window_BCHW = jnp.exp(window_BCHW - largest_BCH[..., None])
  entry_BCHN = jnp.exp(entry_BCHN - largest_BCH[..., None])
  total_BCH = window_BCHW.sum(-1) + entry_BCHN.sum(-1) + jnp.exp(sink_H - largest_BCH)
  out_BCHd = _weigh(window_BCHW.astype(q_BCHd.dtype), window_BWd)
  if entry_kv_BNd is not None:
    out_BCHd += _weigh(entry_BCHN.astype(q_BCHd.dtype), entry_kv_BNd)
  out_BCHd = (out_BCHd / total_BCH[..., None]).astype(q_BCHd.dtype)
  teacher_BCK = None
  if with_teacher:
    share_BCN = jax.lax.stop_gradient(jnp.sum(entry_BCHN / total_BCH[..., None], axis=2))
    taken_BCK = jnp.take_along_axis(share_BCN, jnp.maximum(selection_BCK, 0), axis=-1)
    teacher_BCK = jnp.where(selection_BCK >= 0, taken_BCK, 0.0)
  return out_BCHd, largest_BCH + jnp.log(total_BCH), teacher_BCK


def _scores(q_BCHd, keys_BNd, visible_BCN):
  scale = q_BCHd.shape[-1] ** -0.5
  scores_BCHN = einsum_f32("bchd,bnd->bchn", q_BCHd, keys_BNd)
  return jnp.where(visible_BCN[:, :, None], scores_BCHN * scale, _LOWEST)


def _weigh(p_BCHN, values_BNd):
  return einsum_f32("bchn,bnd->bchd", p_BCHN, values_BNd)
