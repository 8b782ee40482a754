"""Sparse attention on TPUs: limits, sizes and chunks of entries; the kernels are in tpu_*.py.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries, C queries of a
chunk, T queries of a tile, G tiles of a row, S = B Q slots of all rows after filling up, M = T H
score rows of a tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.chunks import over_queries
from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.ops.sparse_attention import tpu_backward, tpu_forward, tpu_plan, tpu_rows
from deepseek_jax.ops.sparse_attention.tpu_plan import Chip, Plan
from deepseek_jax.ops.sparse_attention.tpu_tiles import Chunk, Sizes
from deepseek_jax.ops.table_lookup import take_own

_WINDOW = 128  # slots: a block of them is what a tile of the matrix unit holds
# Windows that a block of a list is as long as. With 128 and with 512 places the compiler's schedule
# was longer than with 256 (docs/log.md).
_BLOCK_WINDOWS = 2
# Without lists nothing is shared but the two blocks of the window: 16 queries of 64 heads are 1,024
# score rows, which keep the matrix unit busy for as long as its operands take to load.
_WINDOW_TILE = 16
_TEACHER_QUERIES = 128  # at a time; bounds the gathered entries to [B, 128, K, d]


def require(q_BQHd: jax.Array, window: int) -> None:
  """Raises NotImplementedError for what the kernels cannot run."""
  heads, width = q_BQHd.shape[2:]
  if dispatch.device().platform == "gpu":
    raise NotImplementedError("the TPU kernels of sparse attention do not run on a GPU")
  if window != _WINDOW:
    raise NotImplementedError(f"window is {window}, the TPU kernels take {_WINDOW}")
  if q_BQHd.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(f"q is {q_BQHd.dtype}, the TPU kernels take bfloat16 and float32")
  columns = 4 * tpu_rows.LANES // q_BQHd.dtype.itemsize
  if width % columns:
    raise NotImplementedError(
      f"head width is {width}, the TPU kernels take multiples of {columns} in {q_BQHd.dtype}: "
      "a row of the table is moved as whole lines of 128 words of 32 bits"
    )
  if heads % 16 and pltpu.is_tpu_device():
    raise NotImplementedError(
      f"heads are {heads}, the TPU kernels take multiples of 16: a register of bfloat16 is 16 high"
    )


def plan(
  selection_BQK: jax.Array,
  entries: int,
  *,
  window: int,
  chip: Chip | None = None,
) -> Plan | None:
  """The lists of a selection, for both passes of all layers that share it.

  Args:
    selection_BQK: int32 entry ids, -1 for none.
    entries: N.
    window: slots.
    chip: sizes to plan for, those of the device by default.
  """
  chip = chip or tpu_plan.chip()
  if 0 in (entries, selection_BQK.shape[-1]):
    return None
  queries = selection_BQK.shape[1]
  fill = _filled(queries, window, chip.cores) - queries
  selection_BQK = jnp.pad(selection_BQK, [(0, 0), (0, fill), (0, 0)], constant_values=-1)
  return tpu_plan.make(selection_BQK, chip.tile, _BLOCK_WINDOWS * window)


def forward(
  q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, sink_H, plan, *,
  window, chip: Chip | None = None,
):  # fmt: skip
  """out [B, Q, H, d] in q's dtype and lse [B, Q, H] float32, sink included."""
  del selection_BQK  # the plan holds it
  chip = chip or tpu_plan.chip()
  sizes = _sizes(q_BQHd, plan, window, chip)
  spare = lambda sizes: 0  # any row: its bits are 0
  bytes_of_entry = q_BQHd.shape[3] * q_BQHd.dtype.itemsize
  sizes, chunks = _in_chunks(
    sizes, entry_kv_BNd, plan, chip, bytes_of_entry, tpu_forward.vmem_bytes, spare
  )
  joined = functools.partial(_joined, length=sizes.tiles * sizes.tile)
  results: Any = None
  for chunk in chunks:
    results = tpu_forward.forward(
      sizes,
      joined(q_BQHd),
      joined(window_kv_BQd),
      _first_slots(segment_start_BQ, sizes),
      sink_H.astype(jnp.float32),
      chunk,
      results,
      vmem=chip.vmem,
      interpret=not pltpu.is_tpu_device(),
    )
  out_SHd, lse_G1M = results
  return _rows(out_SHd, q_BQHd), _rows(lse_G1M.reshape(-1, sizes.heads), q_BQHd)


def backward(
  q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, plan, lse_BQH, delta_BQH,
  d_out_BQHd, *, window, chip: Chip | None = None,
):  # fmt: skip
  """d_q [B, Q, H, d] in q's dtype, d_window_kv [B, Q, d] and d_entry_kv [B, N, d] float32."""
  del selection_BQK
  chip = chip or tpu_plan.chip()
  sizes = _sizes(q_BQHd, plan, window, chip)
  spare = lambda sizes: sizes.entries
  bytes_of_entry = q_BQHd.shape[3] * (q_BQHd.dtype.itemsize + 4)
  sizes, chunks = _in_chunks(
    sizes, entry_kv_BNd, plan, chip, bytes_of_entry, tpu_backward.vmem_bytes, spare
  )
  joined = functools.partial(_joined, length=sizes.tiles * sizes.tile)
  by_tile = lambda x_BQH: joined(x_BQH).reshape(-1, 1, sizes.score_rows)
  d_q_SHd, d_window_Sd, d_entries = None, None, []
  for chunk in chunks:
    d_q_SHd, d_chunk_window_Sd, d_chunk_BNd = tpu_backward.backward(
      sizes,
      joined(q_BQHd),
      joined(window_kv_BQd),
      _first_slots(segment_start_BQ, sizes),
      by_tile(lse_BQH),
      by_tile(delta_BQH),
      joined(d_out_BQHd),
      chunk,
      d_q_SHd,
      vmem=chip.vmem,
      interpret=not pltpu.is_tpu_device(),
    )
    d_window_Sd = d_chunk_window_Sd if d_window_Sd is None else d_window_Sd
    d_entries.append(d_chunk_BNd)
  d_entry_kv_BNd = None
  if entry_kv_BNd is not None:
    d_entry_kv_BNd = jnp.zeros(entry_kv_BNd.shape, jnp.float32)
    if plan is not None:
      d_entry_kv_BNd = jnp.concatenate(d_entries, axis=1)[:, : entry_kv_BNd.shape[1]]
  return _rows(d_q_SHd, q_BQHd), _rows(d_window_Sd, q_BQHd), d_entry_kv_BNd


def teacher(q_BQHd, entry_kv_BNd, selection_BQK, lse_BQH) -> jax.Array:
  """Probability of every chosen entry, summed over heads: float32 [B, Q, K], 0 where none."""
  if entry_kv_BNd.shape[1] == 0:
    return jnp.zeros(selection_BQK.shape, jnp.float32)

  def chunk(_, pieces):
    q_BCHd, selection_BCK, lse_BCH = pieces
    taken_BCKd = take_own(entry_kv_BNd, selection_BCK)
    scores_BCHK = einsum_f32("bchd,bckd->bchk", q_BCHd, taken_BCKd) * q_BCHd.shape[-1] ** -0.5
    summed_BCK = jnp.sum(jnp.exp(scores_BCHK - lse_BCH[..., None]), axis=2)
    return jnp.where(selection_BCK >= 0, summed_BCK, 0)

  return over_queries(chunk, (q_BQHd, selection_BQK, lse_BQH), _TEACHER_QUERIES)


def _sizes(q_BQHd, plan: Plan | None, window: int, chip: Chip) -> Sizes:
  rows, queries, heads, width = q_BQHd.shape
  filled = _filled(queries, window, chip.cores)
  tile = min(_WINDOW_TILE, window) if plan is None else plan.tile
  blocks = 0 if plan is None else plan.entry_BGJR.shape[-2]
  block = _BLOCK_WINDOWS * window
  return Sizes(
    rows, chip.cores, filled // tile, tile, heads, width, window, blocks, block, entries=0
  )


def _filled(queries: int, window: int, cores: int) -> int:
  """Queries of a row, filled up to the same number of whole window blocks for every core."""
  return -(-queries // (window * cores)) * window * cores


def _in_chunks(
  sizes: Sizes, entry_kv_BNd, plan: Plan | None, chip: Chip, bytes_of_entry, vmem_bytes, spare
):
  """The sizes with entries per chunk, and the chunks: as few as fit, all of the same size."""
  if plan is None:
    return sizes, [None]
  _, entries, width = entry_kv_BNd.shape
  fit = (chip.vmem - vmem_bytes(sizes, entry_kv_BNd.dtype.itemsize)) // bytes_of_entry
  fit = fit // tpu_backward.SPARE_ROWS * tpu_backward.SPARE_ROWS
  if fit <= 0:
    raise NotImplementedError(
      f"heads are {sizes.heads} of width {width}: a tile of {sizes.tile} queries leaves no room "
      f"for entries in {chip.vmem} bytes of vector memory"
    )
  count = -(-entries // fit)
  of_chunk = -(-entries // (count * tpu_backward.SPARE_ROWS)) * tpu_backward.SPARE_ROWS
  sizes = sizes._replace(entries=of_chunk)
  filled_BNd = jnp.pad(entry_kv_BNd, [(0, 0), (0, count * of_chunk - entries), (0, 0)])
  table = tpu_rows.pack(filled_BNd.reshape(-1, width))
  chunks = []
  for i in range(count):
    span = tpu_plan.cut(plan, i * of_chunk, (i + 1) * of_chunk, spare(sizes))
    chunks.append(Chunk(span, table, (i, count)))
  return sizes, chunks


def _joined(x_BQ, length: int) -> jax.Array:
  """[B, Q, ...] -> [B length, ...], every row filled up with zeros."""
  fill = [(0, 0), (0, length - x_BQ.shape[1])] + [(0, 0)] * (x_BQ.ndim - 2)
  return jnp.pad(x_BQ, fill).reshape(-1, *x_BQ.shape[2:])


def _rows(x_S, like_BQ) -> jax.Array:
  """[B length, ...] -> [B, Q, ...] without what was filled up."""
  rows, queries = like_BQ.shape[:2]
  return x_S.reshape(rows, -1, *x_S.shape[1:])[:, :queries]


def _first_slots(segment_start_BQ, sizes: Sizes) -> jax.Array:
  """int32 [B G, 1, T]; queries that fill a row up see nothing."""
  length = sizes.tiles * sizes.tile
  fill = [(0, 0), (0, length - segment_start_BQ.shape[1])]
  first_BQ = jnp.pad(segment_start_BQ.astype(jnp.int32), fill, constant_values=length)
  return first_BQ.reshape(-1, 1, sizes.tile)
