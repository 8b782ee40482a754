"""The indexer's loss with scores of chosen entries only: cost and memory do not grow with context.

Keys of the chosen entries are gathered for a chunk of queries at a time, in both directions. Their
gradient is one row for each (query, choice), and the rows of an entry are added up in a fixed
order: on a GPU a scatter-add is not, because its atomics land in any order; there the rows are
sorted by entry once and summed by the kernel that sums attention's rows, which runs at memory
speed, while sorted segment sums in plain JAX are atomics again and a scan is several passes.

Legend: B rows, Q queries, C queries of a chunk, I indexer heads, i indexer width, N entry cells, K
chosen entries, n chunks, S = B Q, M = B N, R = C K contribution rows.
"""

import functools

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.chunks import join, split
from deepseek_jax.ops.indexer import reference, tiles
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.sparse_attention import reduce_rows
from deepseek_jax.ops.table_lookup import take_own


def by_scatter(q_BQIi, keys_BNi, head_weights_BQI, selection_BQK, teacher_BQK, counts_BQ):
  """As the public op; for devices whose scatter-add has a fixed order."""
  if dispatch.device().platform == "gpu":
    raise NotImplementedError("a scatter-add on a GPU adds in any order")
  return _divergence(
    "scatter", q_BQIi, keys_BNi, head_weights_BQI, selection_BQK, teacher_BQK, counts_BQ
  )


def by_sorted_rows(q_BQIi, keys_BNi, head_weights_BQI, selection_BQK, teacher_BQK, counts_BQ):
  """As the public op; the rows of one entry are summed by a GPU kernel."""
  width = keys_BNi.shape[2]
  if width & (width - 1):
    raise NotImplementedError(f"keys have {width} channels, the kernel takes powers of two")
  return _divergence(
    "sorted", q_BQIi, keys_BNi, head_weights_BQI, selection_BQK, teacher_BQK, counts_BQ
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(add, q_BQIi, keys_BNi, weights_BQI, selection_BQK, teacher_BQK, counts_BQ):
  del add

  def chunk(piece):
    q_BCIi, weights_BCI, selection_BCK, teacher_BCK = piece
    taken_BCKi = take_own(keys_BNi, selection_BCK)
    scores_BCK = _scores(_products(q_BCIi, taken_BCKi), weights_BCI)
    return reference.kl_from_scores(scores_BCK, selection_BCK, teacher_BCK)

  pieces = _split(keys_BNi.shape[2], q_BQIi, weights_BQI, selection_BQK, teacher_BQK)
  per_query_BQ = join(jax.lax.map(chunk, pieces), counts_BQ.shape[1])
  return jnp.sum(jnp.where(counts_BQ, per_query_BQ, 0.0))


def _forward(add, *arrays):
  return _divergence(add, *arrays), arrays


def _backward(add, arrays, d_total):
  """With s the scores: d w_h = sum_k d s_k relu(p_hk);  d p_hk = d s_k w_h where p_hk > 0."""
  q_BQIi, keys_BNi, weights_BQI, selection_BQK, teacher_BQK, counts_BQ = arrays
  d_kl_BQ = jnp.where(counts_BQ, d_total, 0.0)
  pieces = _split(keys_BNi.shape[2], q_BQIi, weights_BQI, selection_BQK, teacher_BQK, d_kl_BQ)

  def chunk(d_keys_BNi, piece):
    (q_BCIi, weights_BCI, selection_BCK, teacher_BCK, d_kl_BC), plan = piece
    taken_BCKi = take_own(keys_BNi, selection_BCK)
    products_BCIK = _products(q_BCIi, taken_BCKi)
    kl = lambda s: reference.kl_from_scores(s, selection_BCK, teacher_BCK)
    _, pull = jax.vjp(kl, _scores(products_BCIK, weights_BCI))
    (d_scores_BCK,) = pull(d_kl_BC)
    d_scores_BC1K = d_scores_BCK[:, :, None]
    d_weights_BCI = jnp.sum(jax.nn.relu(products_BCIK) * d_scores_BC1K, axis=-1)
    d_active_BCIK = weights_BCI.astype(jnp.float32)[..., None] * d_scores_BC1K
    d_products_BCIK = jnp.where(products_BCIK > 0, d_active_BCIK, 0.0).astype(taken_BCKi.dtype)
    d_q_BCIi = einsum_f32("bcjk,bcki->bcji", d_products_BCIK, taken_BCKi)
    d_taken_BCKi = einsum_f32("bcjk,bcji->bcki", d_products_BCIK, q_BCIi.astype(taken_BCKi.dtype))
    d_keys_BNi = _ADD[add](d_keys_BNi, plan, selection_BCK, d_taken_BCKi)
    return d_keys_BNi, (d_q_BCIi.astype(q_BQIi.dtype), d_weights_BCI)

  plan = _PLAN[add](pieces[2], keys_BNi.shape[1])
  zeros_BNi = jnp.zeros(keys_BNi.shape, jnp.float32)
  d_keys_BNi, (d_q, d_weights) = jax.lax.scan(chunk, zeros_BNi, (pieces, plan))
  queries = counts_BQ.shape[1]
  return (
    join(d_q, queries),
    d_keys_BNi.astype(keys_BNi.dtype),
    join(d_weights, queries).astype(weights_BQI.dtype),
    None,
    None,
    None,
  )


_divergence.defvjp(_forward, _backward)


def _products(q_BCIi, taken_BCKi):
  return einsum_f32("bcji,bcki->bcjk", q_BCIi.astype(taken_BCKi.dtype), taken_BCKi)


def _scores(products_BCIK, weights_BCI):
  return jnp.sum(jax.nn.relu(products_BCIK) * weights_BCI.astype(jnp.float32)[..., None], axis=2)


def _split(width, q_BQIi, weights_BQI, selection_BQK, *others):
  """[B, Q, ...] -> [n, B, C, ...]; the last chunk is filled up with queries that chose nothing."""
  arrays = (q_BQIi, weights_BQI, selection_BQK, *others)
  rows, queries, top_k = selection_BQK.shape
  per_choice = 4 * max(width, q_BQIi.shape[2])  # float32 channels, or products with all heads
  bytes_per_query = max(1, rows * top_k * per_choice)  # C is of each row
  chunk = min(queries, max(1, tiles.DIVERGENCE_BYTES // bytes_per_query))
  return tuple(split(x, chunk, fill=-1 if x.dtype == jnp.int32 else 0) for x in arrays)


def _scatter(d_keys_BNi, plan, selection_BCK, d_taken_BCKi):
  del plan
  past = d_keys_BNi.shape[1]
  id_BCK = jnp.where(selection_BCK >= 0, selection_BCK, past)
  add = lambda d_keys_Ni, id_CK, rows_CKi: d_keys_Ni.at[id_CK].add(rows_CKi, mode="drop")
  return jax.vmap(add)(d_keys_BNi, id_BCK, d_taken_BCKi)


def _sorted_plan(selection_nBCK, entries: int):
  chunks, rows, queries, top_k = selection_nBCK.shape
  first_B11 = (jnp.arange(rows, dtype=jnp.int32) * entries)[:, None, None]
  selection_nBCK = jnp.where(selection_nBCK >= 0, selection_nBCK + first_B11, -1)
  return reduce_rows.invert(
    selection_nBCK.reshape(chunks * rows * queries, top_k),
    rows * entries,
    chunk=rows * queries,
    keys_per_query=top_k,
  )


def _sum_sorted(d_keys_BNi, plan, selection_BCK, d_taken_BCKi):
  del selection_BCK
  width = d_keys_BNi.shape[2]
  d_keys_Mi = reduce_rows.add_by_entry(
    plan, d_taken_BCKi.reshape(-1, width), d_keys_BNi.reshape(-1, width)
  )
  return d_keys_Mi.reshape(d_keys_BNi.shape)


_PLAN = {"scatter": lambda selection_nBCK, entries: None, "sorted": _sorted_plan}
_ADD = {"scatter": _scatter, "sorted": _sum_sorted}
