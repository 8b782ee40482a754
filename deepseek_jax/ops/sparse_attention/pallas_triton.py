"""Sparse attention for any NVIDIA GPU, in Pallas-Triton: the portable back end.

One program per query and block of heads walks over the chosen entries and the window, 64 keys at a
time. The backward pass is split: one kernel leaves dS and a row of
contributions for every (query, key), a second one turns dS into d_q, and `reduce_rows` sums the
rows per key in a fixed order, so that two runs agree bit for bit.

Legend: B rows, Q queries, H heads (of a program, inside kernels), d head width, N entry cells,
K chosen entries (keys of a step, inside kernels), L = K filled up to whole blocks, S = B Q,
M = B N, R keys of a query, G blocks of heads, C queries of a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from deepseek_jax.ops.sparse_attention import reduce_rows, tiles
from deepseek_jax.ops.sparse_attention.joined_rows import first_window_slot, join, join_selection
from deepseek_jax.ops.triton_call import triton_call

_LOG2_E = 1.4426950408889634  # kernels work with powers of two

# Shared memory of a block by compute capability, bytes (CUDA programming guide, technical
# specifications); other devices are taken to have the least of them.
_SHARED_MEMORY = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
_LEAST_SHARED_MEMORY = 99 << 10


class _Launch(NamedTuple):
  keys: int  # of a step, at most those of `_block`
  num_warps: int
  num_stages: int


# As measured on an H200 (docs/log.md). The contributions hold queries, d_out and
# one block of keys, which leaves no memory to fetch the next block into.
_FORWARD = _Launch(keys=64, num_warps=8, num_stages=2)
_TEACHER = _Launch(keys=64, num_warps=4, num_stages=3)
_CONTRIBUTIONS = _Launch(keys=64, num_warps=4, num_stages=1)
_QUERY_GRADIENT = _Launch(keys=64, num_warps=8, num_stages=3)
_PART = 256  # channels of the contributions at a time


class Plan(NamedTuple):
  """What the kernels need of a selection; made once, used by every layer that shares it."""

  selection_SL: jax.Array  # int32 ids into all rows' entries, -1 at the end
  count_S: jax.Array  # int32 how many of them are not -1
  inverse: reduce_rows.Inverse  # which (query, choice) pairs chose each entry


def require(q_BQHd: jax.Array, window: int) -> None:
  """Raises NotImplementedError for widths, dtypes and devices that the kernels cannot take."""
  del window
  width = q_BQHd.shape[-1]
  if width < 16 or width & (width - 1):
    raise NotImplementedError(f"head width is {width}, Triton takes powers of two from 16 on.")
  if q_BQHd.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f"q is {q_BQHd.dtype}, Triton takes bfloat16 and float32.")
  if _capability() < 80:
    raise NotImplementedError(f"compute capability is {_capability()}, bfloat16 products need 80.")
  _block(q_BQHd)


def _capability() -> int:
  """Of the GPU; where kernels are interpreted, they are cut up as for Hopper."""
  return plt.get_gpu_info().compute_capability if plt.is_gpu_device() else 90


def _block(q_Hd: jax.Array) -> int:
  """Keys of a step, and at most as many heads of a program: what shared memory holds."""
  limit = _SHARED_MEMORY.get(_capability(), _LEAST_SHARED_MEMORY)
  itemsize = q_Hd.dtype.itemsize
  # Without tensor cores a product is unrolled into single multiply-adds: larger blocks take minutes
  # to compile.
  for block in (tiles.KEYS, 32, 16) if itemsize == 2 else (16,):
    # Queries, d_out and keys, or queries and keys twice; and two products of each.
    if (3 * q_Hd.shape[-1] + 4 * block) * block * itemsize <= limit:
      return block
  raise NotImplementedError(
    f"head width is {q_Hd.shape[-1]}, too much for {limit} bytes of memory."
  )


def _chunk(queries: int, keys_per_query: int) -> int:
  """Queries whose contributions exist at a time: equal chunks, so that few slots stay empty."""
  most = max(1, tiles.BACKWARD_ROWS // keys_per_query)
  return -(-queries // -(-queries // most))


def plan(selection_BQK: jax.Array, entries: int, *, window: int) -> Plan:
  """Joins the rows of a selection and inverts it.

  Args:
    selection_BQK: int32 entry ids, ascending, -1 at the end.
    entries: N.
    window: slots, the query's own included.
  """
  rows, queries, _ = selection_BQK.shape
  selection_SL = join_selection(selection_BQK, entries, block=tiles.KEYS)
  keys_per_query = selection_SL.shape[1] + _window_keys(window)
  chunk = _chunk(rows * queries, keys_per_query)
  inverse = reduce_rows.invert(
    selection_SL, rows * entries, chunk=chunk, keys_per_query=keys_per_query
  )
  return Plan(selection_SL, _count(selection_SL), inverse)


def _count(selection_SL):
  return jnp.sum(selection_SL >= 0, axis=1, dtype=jnp.int32)


def _window_keys(window: int) -> int:
  return -(-window // tiles.KEYS) * tiles.KEYS


def _heads(heads: int, block: int) -> int:
  """Heads of a program: Triton multiplies blocks of powers of two from 16 on."""
  return min(block, max(16, pl.next_power_of_2(heads)))


def _whole_blocks(x_SH, heads: int, fill: float = 0):
  """Fills the head axis up to a multiple of `heads`; the release has whole blocks."""
  missing = -x_SH.shape[1] % heads
  padding = [(0, 0), (0, missing)] + [(0, 0)] * (x_SH.ndim - 2)
  return jnp.pad(x_SH, padding, constant_values=fill) if missing else x_SH


def _product(x, y, contract: tuple[int, int]):
  """x . y over one axis of each, in float32; float32 operands are not rounded to tf32."""
  if not plt.is_gpu_device():  # XLA's CPU backend has no bfloat16 product with a float32 result
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  axes = (((contract[0],), (contract[1],)), ((), ()))
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jax.lax.dot_general(x, y, axes, precision, jnp.float32)


class _Sizes(NamedTuple):
  heads: int  # of a program
  most_keys: int  # of a step
  chosen: int  # L, or 0 without entries
  window: int

  @property
  def keys_per_query(self) -> int:
    return self.chosen + _window_keys(self.window)


def _run(
  kernel, launch: _Launch, sizes: _Sizes, arrays, outputs, grid, *, in_place=None, **options
):
  """Calls kernel(*refs, sizes=sizes, keys=keys of a step, **options)."""
  options |= {"sizes": sizes, "keys": min(launch.keys, sizes.most_keys)}
  return triton_call(
    functools.partial(kernel, **options),
    arrays,
    outputs,
    grid,
    in_place=in_place,
    num_warps=launch.num_warps,
    num_stages=launch.num_stages,
  )


def _keys(plan, entry_kv_BNd, window_kv_Sd, first_S):
  """(L, what `_over_keys` reads); without entries L is 0 and their arrays are never read."""
  if plan is None or not plan.selection_SL.size or not entry_kv_BNd.size:
    return 0, (window_kv_Sd, first_S[:, None], first_S, window_kv_Sd, first_S)
  chosen = (join(entry_kv_BNd), plan.selection_SL, plan.count_S)
  return plan.selection_SL.shape[1], (*chosen, window_kv_Sd, first_S)


def _over_keys(visit, state, t, refs, sizes: _Sizes, keys: int, *, hidden_blocks: bool):
  """Folds visit(table_ref, rows_K, visible_K, key, state) over the keys of query t, in order.

  Args:
    visit: rows_K are rows of table_ref; key is the number of the block's first key, the window's
      keys coming after the L chosen ones.
    hidden_blocks: also visit blocks of the window that the query does not see at all.
  """
  table_ref, selection_ref, count_ref, window_ref, first_ref = refs
  start = t - (sizes.window - 1)

  def visit_chosen(i, state):
    ids_K = selection_ref[t, pl.ds(i * keys, keys)]
    return visit(table_ref, jnp.maximum(ids_K, 0), ids_K >= 0, i * keys, state)

  def visit_window(i, state):
    slot_K = start + i * keys + jnp.arange(keys)
    visible_K = (slot_K >= first_ref[t]) & (slot_K <= t)
    return visit(window_ref, jnp.clip(slot_K, 0, t), visible_K, sizes.chosen + i * keys, state)

  if sizes.chosen:
    state = jax.lax.fori_loop(0, pl.cdiv(count_ref[t], keys), visit_chosen, state)
  begin = 0 if hidden_blocks else jnp.maximum(first_ref[t] - start, 0) // keys
  return jax.lax.fori_loop(begin, _window_keys(sizes.window) // keys, visit_window, state)


def forward(
  q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, sink_H, plan, *, window
):
  """Output in q's dtype and the float32 log of the softmax denominator, sink included.

  Arguments, formula and shapes are those of `sparse_attention`; plan is that of the selection.
  """
  del selection_BQK  # the plan holds it
  rows, queries, heads, width = q_BQHd.shape
  block = _block(q_BQHd)
  per_program = _heads(heads, block)
  q_SHd = _whole_blocks(join(q_BQHd), per_program)
  first_S = first_window_slot(segment_start_BQ, window)
  chosen, key_arrays = _keys(plan, entry_kv_BNd, join(window_kv_BQd), first_S)
  # For Blackwell, Triton keeps one more copy of the keys.
  launch = _FORWARD if _capability() < 100 else _FORWARD._replace(num_stages=1)
  out_SHd, lse_SH = _run(
    _forward_kernel,
    launch,
    _Sizes(per_program, block, chosen, window),
    (q_SHd, _whole_blocks(sink_H[None], per_program)[0], *key_arrays),
    [
      jax.ShapeDtypeStruct(q_SHd.shape, q_SHd.dtype),
      jax.ShapeDtypeStruct(q_SHd.shape[:2], jnp.float32),
    ],
    (q_SHd.shape[0], q_SHd.shape[1] // per_program),
  )
  out_BQHd = out_SHd[:, :heads].reshape(rows, queries, heads, width)
  return out_BQHd, lse_SH[:, :heads].reshape(rows, queries, heads)


def _forward_kernel(q_ref, sink_ref, *refs, sizes: _Sizes, keys: int):
  *key_refs, out_ref, lse_ref = refs
  t, heads = pl.program_id(0), pl.ds(pl.program_id(1) * sizes.heads, sizes.heads)
  q_Hd = q_ref[t, heads, :]
  scale = q_Hd.shape[1] ** -0.5 * _LOG2_E

  def visit(table_ref, rows_K, visible_K, key, state):
    del key
    largest_H, total_H, sum_Hd = state
    kv_Kd = table_ref[rows_K, :]
    scores_HK = jnp.where(visible_K[None], _product(q_Hd, kv_Kd, (1, 1)) * scale, -jnp.inf)
    new_H = jnp.maximum(largest_H, jnp.max(scores_HK, axis=1))
    p_HK, fade_H = jnp.exp2(scores_HK - new_H[:, None]), jnp.exp2(largest_H - new_H)
    sum_Hd = sum_Hd * fade_H[:, None] + _product(p_HK.astype(kv_Kd.dtype), kv_Kd, (1, 0))
    return new_H, total_H * fade_H + jnp.sum(p_HK, axis=1), sum_Hd

  # The sink is a key without a value, so the largest score is finite from the start.
  sink_H = sink_ref[heads] * _LOG2_E
  state = (sink_H, jnp.ones_like(sink_H), jnp.zeros(q_Hd.shape, jnp.float32))
  state = _over_keys(visit, state, t, key_refs, sizes, keys, hidden_blocks=False)
  largest_H, total_H, sum_Hd = state
  out_ref[t, heads, :] = (sum_Hd / total_H[:, None]).astype(out_ref.dtype)
  lse_ref[t, heads] = largest_H / _LOG2_E + jnp.log(total_H)


def teacher(q_BQHd, entry_kv_BNd, selection_BQK, lse_BQH) -> jax.Array:
  """[B,Q,K] float32: probability of each choice summed over heads, 0 where the selection is -1.

  sum_h exp(q_h . k / sqrt(d) - lse_h), one block of keys at a time.
  """
  heads = q_BQHd.shape[2]
  if not selection_BQK.size or not entry_kv_BNd.size:
    return jnp.zeros(selection_BQK.shape, jnp.float32)
  block = _block(q_BQHd)
  per_program = _heads(heads, block)
  q_SHd = _whole_blocks(join(q_BQHd), per_program)
  lse_SH = _whole_blocks(join(lse_BQH), per_program, fill=jnp.inf)  # no probability
  selection_SL = join_selection(selection_BQK, entry_kv_BNd.shape[1], block=tiles.KEYS)
  blocks, chosen = q_SHd.shape[1] // per_program, selection_SL.shape[1]
  [sum_GSL] = _run(
    _teacher_kernel,
    _TEACHER,
    _Sizes(per_program, block, chosen, window=0),
    (q_SHd, join(entry_kv_BNd), selection_SL, _count(selection_SL), lse_SH),
    [jax.ShapeDtypeStruct((blocks, *selection_SL.shape), jnp.float32)],
    (q_SHd.shape[0], blocks),
  )
  return jnp.sum(sum_GSL, axis=0)[:, : selection_BQK.shape[2]].reshape(selection_BQK.shape)


def _teacher_kernel(
  q_ref, table_ref, selection_ref, count_ref, lse_ref, sum_ref, *, sizes: _Sizes, keys: int
):
  t, block = pl.program_id(0), pl.program_id(1)
  here = pl.ds(block * sizes.heads, sizes.heads)
  q_Hd, lse_H = q_ref[t, here, :], lse_ref[t, here] * _LOG2_E
  scale = q_Hd.shape[1] ** -0.5 * _LOG2_E

  def visit(i, _):
    ids_K = selection_ref[t, pl.ds(i * keys, keys)]
    scores_HK = _product(q_Hd, table_ref[jnp.maximum(ids_K, 0), :], (1, 1)) * scale
    sum_K = jnp.sum(jnp.exp2(scores_HK - lse_H[:, None]), axis=0)
    sum_ref[block, t, pl.ds(i * keys, keys)] = jnp.where(ids_K >= 0, sum_K, 0)

  def clear(i, _):
    sum_ref[block, t, pl.ds(i * keys, keys)] = jnp.zeros(keys, jnp.float32)

  used = pl.cdiv(count_ref[t], keys)
  jax.lax.fori_loop(0, used, visit, None)
  jax.lax.fori_loop(used, sizes.chosen // keys, clear, None)


def backward(
  q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, plan, lse_BQH, delta_BQH,
  d_out_BQHd, *, window,
):  # fmt: skip
  """Gradients of q in its dtype, of window and entry keys in float32.

  p = exp(q . k / sqrt(d) - lse);  ds = p (d_out . k - delta) / sqrt(d);
  d_q = sum ds k;  d_k = sum ds q + p d_out.

  Args:
    lse_BQH: as returned by `forward`.
    delta_BQH: float32 out . d_out - d_lse.
    d_out_BQHd: gradient of the output, in q's dtype.
    others: as of `forward`.
  """
  del selection_BQK
  block = _block(q_BQHd)
  per_program = _heads(q_BQHd.shape[2], block)
  whole = lambda x_BQH: _whole_blocks(join(x_BQH), per_program)
  first_S = first_window_slot(segment_start_BQ, window)
  chosen, key_arrays = _keys(plan, entry_kv_BNd, join(window_kv_BQd), first_S)
  sizes = _Sizes(per_program, block, chosen, window)
  chunk = _chunk(first_S.size, sizes.keys_per_query)
  backward_chunk = functools.partial(
    _backward_chunk,
    arrays=(whole(q_BQHd), whole(d_out_BQHd), whole(lse_BQH), whole(delta_BQH)),
    key_arrays=key_arrays,
    sizes=sizes,
    chunk=chunk,
  )
  zeros = lambda x_BNd: jnp.zeros_like(join(x_BNd), jnp.float32)
  d_entry_kv_Md = None if entry_kv_BNd is None else zeros(entry_kv_BNd)
  gradients = (jnp.zeros_like(whole(q_BQHd)), zeros(window_kv_BQd), d_entry_kv_Md)
  offset_C = jnp.arange(0, first_S.size, chunk, dtype=jnp.int32)
  inverse = plan.inverse if chosen else None
  gradients, _ = jax.lax.scan(backward_chunk, gradients, (offset_C, inverse))
  d_q_SHd, d_window_kv_Sd, d_entry_kv_Md = gradients
  if entry_kv_BNd is not None and d_entry_kv_Md is not None:
    d_entry_kv_Md = d_entry_kv_Md.reshape(entry_kv_BNd.shape)
  d_q_BQHd = d_q_SHd[:, : q_BQHd.shape[2]].reshape(q_BQHd.shape)
  return d_q_BQHd, d_window_kv_Sd.reshape(window_kv_BQd.shape), d_entry_kv_Md


def _backward_chunk(gradients, chunk_inputs, *, arrays, key_arrays, sizes: _Sizes, chunk: int):
  """Adds the queries offset .. offset + chunk - 1 to the gradients, a block of heads at a time."""
  (d_q_SHd, d_window_kv_Sd, d_entry_kv_Md), (offset, inverse) = gradients, chunk_inputs
  _, heads, width = d_q_SHd.shape
  array = lambda *shape: jax.ShapeDtypeStruct(shape, d_q_SHd.dtype)
  for block in range(heads // sizes.heads):
    contributions_CRd, ds_CHR = _run(
      _contributions_kernel,
      _CONTRIBUTIONS,
      sizes,
      (offset[None], *arrays, *key_arrays),
      [
        array(chunk, sizes.keys_per_query, width),
        array(chunk, sizes.heads, sizes.keys_per_query),
      ],
      (chunk,),
      block=block,
    )
    [d_q_SHd] = _run(
      _query_gradient_kernel,
      _QUERY_GRADIENT,
      sizes,
      (d_q_SHd, offset[None], ds_CHR, *key_arrays),
      [array(*d_q_SHd.shape)],
      (chunk,),
      in_place={0: 0},
      block=block,
    )
    contributions_Rd = join(contributions_CRd)
    if sizes.chosen:
      d_entry_kv_Md = reduce_rows.add_by_entry(inverse, contributions_Rd, d_entry_kv_Md)
    d_window_kv_Sd = reduce_rows.add_window_band(
      offset,
      contributions_Rd,
      d_window_kv_Sd,
      window=sizes.window,
      chunk=chunk,
      keys_per_query=sizes.keys_per_query,
      first_key=sizes.chosen,
    )
  return (d_q_SHd, d_window_kv_Sd, d_entry_kv_Md), None


def _query(offset_ref, queries: int):
  """The query of this program; the last chunk repeats the last query, to the same result."""
  return jnp.minimum(offset_ref[0] + pl.program_id(0), queries - 1)


def _contributions_kernel(
  offset_ref, q_ref, d_out_ref, lse_ref, delta_ref, *refs, block: int, sizes: _Sizes, keys: int
):
  """dS of one query, and its contribution dS^T q + P^T d_out to each of its keys.

  P and dS are rounded to q's dtype, which the matrix units need; so are the contributions, once per
  key, their heads already summed.
  """
  *key_refs, contributions_ref, ds_ref = refs
  local, t = pl.program_id(0), _query(offset_ref, q_ref.shape[0])
  heads = pl.ds(block * sizes.heads, sizes.heads)
  width = q_ref.shape[2]
  # Registers hold the contributions of so many channels at a time.
  part = min(width, _PART)
  columns = [pl.ds(begin, part) for begin in range(0, width, part)]
  q_parts = [q_ref[t, heads, here] for here in columns]
  d_out_parts = [d_out_ref[t, heads, here] for here in columns]
  lse_H, delta_H = lse_ref[t, heads] * _LOG2_E, delta_ref[t, heads]
  scale = width**-0.5
  dot = lambda x_parts, kv_parts: sum(
    _product(x, kv, (1, 1)) for x, kv in zip(x_parts, kv_parts, strict=True)
  )

  def visit(table_ref, rows_K, visible_K, key, _):
    kv_parts = [table_ref[rows_K, here] for here in columns]
    p_HK = jnp.exp2(dot(q_parts, kv_parts) * (scale * _LOG2_E) - lse_H[:, None])
    p_HK = jnp.where(visible_K[None], p_HK, 0)
    ds_HK = p_HK * (dot(d_out_parts, kv_parts) - delta_H[:, None]) * scale
    p_HK, ds_HK = p_HK.astype(ds_ref.dtype), ds_HK.astype(ds_ref.dtype)
    here = pl.ds(key, keys)
    ds_ref[local, :, here] = ds_HK
    for at, q_Hd, d_out_Hd in zip(columns, q_parts, d_out_parts, strict=True):
      row_Kd = _product(p_HK, d_out_Hd, (0, 0)) + _product(ds_HK, q_Hd, (0, 0))
      contributions_ref[local, here, at] = row_Kd.astype(contributions_ref.dtype)

  # The sum over the band reads the rows of every window key, seen or not.
  _over_keys(visit, None, t, key_refs, sizes, keys, hidden_blocks=True)


def _query_gradient_kernel(
  d_q_in_ref, offset_ref, ds_ref, *refs, block: int, sizes: _Sizes, keys: int
):
  del d_q_in_ref  # the other blocks of heads stay as they are
  *key_refs, d_q_ref = refs
  local, t = pl.program_id(0), _query(offset_ref, d_q_ref.shape[0])

  def visit(table_ref, rows_K, visible_K, key, sum_Hd):
    del visible_K  # dS is 0 there
    ds_HK = ds_ref[local, :, pl.ds(key, keys)]
    return sum_Hd + _product(ds_HK, table_ref[rows_K, :], (1, 0))

  sum_Hd = jnp.zeros((sizes.heads, d_q_ref.shape[2]), jnp.float32)
  sum_Hd = _over_keys(visit, sum_Hd, t, key_refs, sizes, keys, hidden_blocks=False)
  d_q_ref[t, pl.ds(block * sizes.heads, sizes.heads), :] = sum_Hd.astype(d_q_ref.dtype)
