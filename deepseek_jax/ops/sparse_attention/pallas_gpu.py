"""Sparse attention on Hopper GPUs: rows of the batch become one sequence for the Mosaic kernels.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries, S = B Q, M = B N,
L = K filled up to whole blocks of keys.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.sparse_attention import (
  hopper_backward,
  hopper_backward_plain,
  hopper_forward,
  hopper_plain,
  hopper_ptx,
  pallas_triton,
  reduce_rows,
  tiles,
)
from deepseek_jax.ops.sparse_attention.joined_rows import first_window_slot, join, join_selection


class Plan(NamedTuple):
  """What the kernels need of a selection; made once, used by every layer that shares it."""

  selection_SL: jax.Array  # int32 ids into all rows' entries, -1 at the end
  inverse: reduce_rows.Inverse  # which (query, choice) pairs chose each entry


def require(q_BQHd: jax.Array, window: int) -> None:
  """Raises NotImplementedError for anything but what the kernels are written for."""
  dispatch.require_hopper()
  if dispatch.device().platform != "cpu":  # there they are interpreted, by any JAX
    hopper_ptx.require_supported()
  if (q_BQHd.shape[2:], q_BQHd.dtype, window) != ((64, 512), jnp.bfloat16, 128):
    raise NotImplementedError(
      "the Hopper kernels take 64 heads of 512 channels in bfloat16 and a window of 128, got "
      f"{q_BQHd.shape[2]} of {q_BQHd.shape[3]} in {q_BQHd.dtype} and {window}"
    )


def plan(selection_BQK: jax.Array, entries: int, *, window: int) -> Plan:
  selection_SL = join_selection(selection_BQK, entries, block=tiles.KEYS)
  inverse = reduce_rows.invert(
    selection_SL,
    selection_BQK.shape[0] * entries,
    chunk=tiles.BACKWARD_QUERIES,
    keys_per_query=selection_SL.shape[1] + window,
  )
  return Plan(selection_SL, inverse)


def _interpreted(plain: ModuleType) -> dict[str, Any]:
  """Without a GPU the kernels run in Mosaic GPU's interpreter, which PTX is unknown to."""
  if dispatch.device().platform != "cpu":
    return {}
  return {"pieces": plain, "interpret": plgpu.InterpretGPUParams()}


def forward(
  q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, sink_H, plan, *, window
):
  del selection_BQK  # the plan holds it
  rows, queries = segment_start_BQ.shape
  out_SHd, lse_SH = hopper_forward.forward(
    join(q_BQHd),
    join(window_kv_BQd),
    None if entry_kv_BNd is None else join(entry_kv_BNd),
    None if plan is None else plan.selection_SL,
    first_window_slot(segment_start_BQ, window),
    sink_H,
    window=window,
    **_interpreted(hopper_plain),
  )
  return out_SHd.reshape(q_BQHd.shape), lse_SH.reshape(rows, queries, -1)


def backward(
  q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, plan, lse_BQH, delta_BQH,
  d_out_BQHd, *, window,
):  # fmt: skip
  del selection_BQK
  d_q_SHd, d_window_kv_Sd, d_entry_kv_Md = hopper_backward.backward(
    join(q_BQHd),
    join(window_kv_BQd),
    None if entry_kv_BNd is None else join(entry_kv_BNd),
    None if plan is None else plan.selection_SL,
    first_window_slot(segment_start_BQ, window),
    None if plan is None else plan.inverse,
    join(lse_BQH),
    join(delta_BQH),
    join(d_out_BQHd),
    window=window,
    chunk=tiles.BACKWARD_QUERIES,
    **_interpreted(hopper_backward_plain),
  )
  d_entry_kv_BNd = entry_kv_BNd
  if d_entry_kv_Md is not None and entry_kv_BNd is not None:
    d_entry_kv_BNd = d_entry_kv_Md.reshape(entry_kv_BNd.shape)
  return d_q_SHd.reshape(q_BQHd.shape), d_window_kv_Sd.reshape(window_kv_BQd.shape), d_entry_kv_BNd


teacher = pallas_triton.teacher
