"""One gradient rule for every back end of sparse attention.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from deepseek_jax.by_slots import KEPT
from deepseek_jax.ops import dispatch


def attend(
  backend: ModuleType,
  q_BQHd,
  window_kv_BQd,
  entry_kv_BNd,
  selection_BQK,
  segment_start_BQ,
  sink_H,
  *,
  window: int,
  plan,
  with_teacher: bool,
):
  """out, lse and teacher of a back end; the gradient keeps its inputs, out and lse.

  With p the probability of a key: dp = d_out . k, ds = p (dp - delta), delta = out . d_out - d_lse.
  The sink is a key without a value: d_sink = -sum p_sink delta. The teacher has no gradient.
  """
  require_one_dtype(q_BQHd, window_kv_BQd, entry_kv_BNd)
  backend.require(q_BQHd, window)
  if selection_BQK is not None:
    make_plan = lambda selection: run_plan(backend, selection, entry_kv_BNd.shape[1], window)
    if plan is None:
      plan = make_plan(selection_BQK)
    else:
      _check_plan(plan, jax.eval_shape(make_plan, selection_BQK))
  out_BQHd, lse_BQH = _attend(
    backend,
    window,
    q_BQHd,
    window_kv_BQd,
    entry_kv_BNd,
    selection_BQK,
    segment_start_BQ,
    sink_H,
    plan,
  )
  teacher_BQK = None
  if with_teacher:
    detached = jax.lax.stop_gradient((q_BQHd, entry_kv_BNd, lse_BQH))
    teacher = dispatch.once(backend.teacher)
    teacher_BQK = teacher(detached[0], detached[1], selection_BQK, detached[2])
  return out_BQHd, lse_BQH, teacher_BQK


def run_plan(backend: ModuleType, selection_BQK, entries: int, window: int):
  """The back end's plan of a selection."""
  plan = dispatch.once(backend.plan, "entries", "window")
  return plan(selection_BQK, entries=entries, window=window)


def require_one_dtype(*floats: jax.Array | None) -> None:
  """Raises NotImplementedError where queries and keys differ: a kernel multiplies one kind."""
  dtypes = {str(x.dtype) for x in floats if x is not None}
  if len(dtypes) > 1:
    raise NotImplementedError(f"queries and keys must have one dtype, got {sorted(dtypes)}")


def _check_plan(plan, wanted) -> None:
  """A plan of another selection would read beyond the arrays."""
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
  if jax.tree.structure(plan) != jax.tree.structure(wanted) or shapes(plan) != shapes(wanted):
    raise ValueError(
      "plan was made for another selection, number of entries or implementation; make it with "
      "plan_selection of the same arguments."
    )


def _run(backend, window, q, window_kv, entry_kv, selection, segment_start, sink, plan):
  return dispatch.once(backend.forward, "window")(
    q, window_kv, entry_kv, selection, segment_start, sink, plan, window=window
  )


def _forward(backend, window, *arrays):
  out_BQHd, lse_BQH = checkpoint_name(_run(backend, window, *arrays), KEPT)
  return (out_BQHd, lse_BQH), (arrays, out_BQHd, lse_BQH)


def _backward(backend, window, saved, cotangents):
  (q, window_kv, entry_kv, selection, segment_start, sink_H, plan), out_BQHd, lse_BQH = saved
  d_out_BQHd, d_lse_BQH = cotangents
  product_BQHd = out_BQHd.astype(jnp.float32) * d_out_BQHd.astype(jnp.float32)
  delta_BQH = jnp.sum(product_BQHd, axis=-1) - d_lse_BQH
  d_sink_H = -jnp.sum(jnp.exp(sink_H - lse_BQH) * delta_BQH, axis=(0, 1))
  d_q, d_window_kv, d_entry_kv = dispatch.once(backend.backward, "window")(
    q, window_kv, entry_kv, selection, segment_start, plan, lse_BQH, delta_BQH, d_out_BQHd,
    window=window,
  )  # fmt: skip
  d_entry_kv = None if entry_kv is None else d_entry_kv.astype(entry_kv.dtype)
  return d_q, d_window_kv.astype(window_kv.dtype), d_entry_kv, None, None, d_sink_H, None


_attend: Any = jax.custom_vjp(_run, nondiff_argnums=(0, 1))
_attend.defvjp(_forward, _backward)
