"""Sparse attention in plain JAX: chosen entries are gathered, window keys come in blocks.

Legend: B rows, Q queries, C queries of a chunk, H heads, d head width, N entry cells, K chosen
entries, W window, G = C / W blocks of a chunk, P = 2 W keys in reach of a block.
"""

import functools

import jax
import jax.numpy as jnp

from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.table_lookup import take_own

QUERY_CHUNK = 512  # about; bounds the gathered entries to [B, 512, K, d]
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
  plan: None = None,
  with_teacher: bool,
):
  del plan  # it needs none
  chunk = max(1, QUERY_CHUNK // window) * window
  # A block of slots before the row and whole chunks after it: every block then has two key blocks.
  end = -q_BQHd.shape[1] % min(chunk, -(-q_BQHd.shape[1] // window) * window)
  keys_BSd = jnp.pad(window_kv_BQd, ((0, 0), (window, end), (0, 0)))
  body = functools.partial(
    _chunk,
    keys_BSd=keys_BSd,
    entry_kv_BNd=entry_kv_BNd,
    sink_H=sink_H,
    window=window,
    with_teacher=with_teacher,
  )
  return over_queries(body, (q_BQHd, selection_BQK, segment_start_BQ), chunk)


def plan(selection_BQK, entry_kv_BNd, q_BQHd, *, window: int) -> None:
  del selection_BQK, entry_kv_BNd, q_BQHd, window


def _chunk(start, queries, *, keys_BSd, entry_kv_BNd, sink_H, window, with_teacher):
  q_BCHd, selection_BCK, segment_start_BC = queries
  window_BGPd, visible_BCP = _window(start, segment_start_BC, keys_BSd, window)
  scale, queries = q_BCHd.shape[-1] ** -0.5, q_BCHd.shape[1]
  window_BGWHP = einsum_f32("bgwhd,bgpd->bgwhp", _in_blocks(q_BCHd, window), window_BGPd) * scale
  window_BCHP = _masked(_out_of_blocks(window_BGWHP, queries), visible_BCP)
  if entry_kv_BNd is None:
    entry_BCHK = window_BCHP[..., :0]
  else:
    taken_BCKd = take_own(entry_kv_BNd, selection_BCK)
    scores_BCHK = einsum_f32("bchd,bckd->bchk", q_BCHd, taken_BCKd) * scale
    entry_BCHK = _masked(scores_BCHK, selection_BCK >= 0)

  largest_BCH = jnp.maximum(
    jnp.maximum(jnp.max(window_BCHP, -1), jnp.max(entry_BCHK, -1, initial=_LOWEST)), sink_H
  )
  largest_BCH = jax.lax.stop_gradient(largest_BCH)
  window_BCHP = jnp.exp(window_BCHP - largest_BCH[..., None])
  entry_BCHK = jnp.exp(entry_BCHK - largest_BCH[..., None])
  total_BCH = window_BCHP.sum(-1) + entry_BCHK.sum(-1) + jnp.exp(sink_H - largest_BCH)
  p_BGWHP = _in_blocks(window_BCHP.astype(q_BCHd.dtype), window)
  out_BCHd = _out_of_blocks(einsum_f32("bgwhp,bgpd->bgwhd", p_BGWHP, window_BGPd), queries)
  if entry_kv_BNd is not None:
    out_BCHd += einsum_f32("bchk,bckd->bchd", entry_BCHK.astype(q_BCHd.dtype), taken_BCKd)
  out_BCHd = (out_BCHd / total_BCH[..., None]).astype(q_BCHd.dtype)
  teacher_BCK = None
  if with_teacher:
    teacher_BCK = jax.lax.stop_gradient(jnp.sum(entry_BCHK / total_BCH[..., None], axis=2))
  return out_BCHd, largest_BCH + jnp.log(total_BCH), teacher_BCK


def _window(start, segment_start_BC, keys_BSd, window: int):
  """Keys in reach of each block, [B,G,2W,d], and which of them each query sees, [B,C,2W]."""
  rows, queries = segment_start_BC.shape
  blocks = -(-queries // window)
  near_BSd = jax.lax.dynamic_slice_in_dim(keys_BSd, start, (blocks + 1) * window, axis=1)
  near_BGWd = near_BSd.reshape(rows, blocks + 1, window, -1)
  keys_BGPd = jnp.concatenate([near_BGWd[:, :-1], near_BGWd[:, 1:]], axis=2)
  slot_C = start + jnp.arange(queries)
  key_slot_CP = (slot_C // window * window)[:, None] + jnp.arange(-window, window)
  first_BC = jnp.maximum(segment_start_BC, slot_C - (window - 1))
  visible_BCP = (key_slot_CP <= slot_C[:, None]) & (key_slot_CP >= first_BC[..., None])
  return keys_BGPd, visible_BCP


def _in_blocks(x_BC, window: int):
  """[B,C,...] -> [B,G,W,...], the last block filled up with zeros."""
  fill = [(0, 0), (0, -x_BC.shape[1] % window)] + [(0, 0)] * (x_BC.ndim - 2)
  return jnp.pad(x_BC, fill).reshape(x_BC.shape[0], -1, window, *x_BC.shape[2:])


def _out_of_blocks(x_BGW, queries: int):
  return x_BGW.reshape(x_BGW.shape[0], -1, *x_BGW.shape[3:])[:, :queries]


def _masked(scores, visible_BCK):
  return jnp.where(visible_BCK[:, :, None], scores, _LOWEST)
