"""Attention over a sliding window and chosen compressed entries, in one softmax with a sink.

Legend: B rows, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.by_slots import Place, by_slots
from deepseek_jax.ops import dispatch
from deepseek_jax.ops.sparse_attention import reference, tiles, vjp


class Attended(NamedTuple):
  out_BQHd: jax.Array  # in q's dtype
  lse_BQH: jax.Array  # float32 log of the softmax denominator, sink included
  teacher_BQK: jax.Array | None  # float32, detached: probability of each choice, summed over heads


# Sinks are clipped to it: products of float32's largest numbers overflow, and a mask is -1e30.
_LARGEST_SINK = 1e20
_KERNELS = ("pallas_gpu", "pallas_triton", "pallas_tpu")  # modules of this package


def _backend(name: str) -> ModuleType:
  return dispatch.load(f"{__name__}.{name}")


def _attend_with(name: str, *arrays, **options):
  return vjp.attend(_backend(name), *arrays, **options)


_IMPLEMENTATIONS = {
  "reference": reference.sparse_attention,
  **{name: functools.partial(_attend_with, name) for name in _KERNELS},
}


def plan_selection(
  selection_BQK: jax.Array,
  entry_kv_BNd: jax.Array,
  q_BQHd: jax.Array,
  *,
  window: int,
  implementation: str | None = None,
) -> Any:
  """What the kernels derive from a selection, once for all layers and passes that use it.

  Returns: a tree of arrays for `sparse_attention(plan=)`, of the implementation that the same
    arguments choose there; None where that one needs no plan.
  """
  plan = functools.partial(
    dispatch.call, _PLANS, implementation, window=window, slow=tiles.slow(q_BQHd)
  )

  def own(place, slots, entry_kv_BNd, pieces, weights):
    del pieces, weights
    selection_BQK, q_BQHd = slots
    halo = place.halo(window - 1)
    return plan(_behind(selection_BQK, halo, fill=-1), entry_kv_BNd, _behind(q_BQHd, halo))

  return by_slots(own, (selection_BQK, q_BQHd), rows=entry_kv_BNd, returns="pieces")


def _behind(x_BQ: jax.Array, count: int, fill: int = 0) -> jax.Array:
  """x behind `count` slots of `fill`: queries that choose nothing, in place of a neighbour's."""
  pads = [(0, 0), (count, 0)] + [(0, 0)] * (x_BQ.ndim - 2)
  return jnp.pad(x_BQ, pads, constant_values=fill)


def _plan_with(name: str, selection_BQK, entry_kv_BNd, q_BQHd, *, window: int):
  backend = _backend(name)
  vjp.require_one_dtype(q_BQHd, entry_kv_BNd)
  backend.require(q_BQHd, window)
  return vjp.run_plan(backend, selection_BQK, entry_kv_BNd.shape[1], window)


_PLANS = {
  "reference": reference.plan,
  **{name: functools.partial(_plan_with, name) for name in _KERNELS},
}


def sparse_attention(
  q_BQHd: jax.Array,
  window_kv_BQd: jax.Array,
  entry_kv_BNd: jax.Array | None,
  selection_BQK: jax.Array | None,
  segment_start_BQ: jax.Array,
  sink_H: jax.Array,
  *,
  window: int,
  plan: Any = None,
  with_teacher: bool = False,
  implementation: str | None = None,
) -> Attended:
  """Each query attends to its window and to its chosen entries; keys are their own values.

  s_n = q . k_n / sqrt(d);  p_n = exp(s_n) / (sum exp(s) + exp(sink));  out = sum p_n k_n.
  Window keys are slots max(segment_start, slot - window + 1) ... slot. A query that sees nothing
  gets 0. Scores and sums are float32; probabilities are rounded to q's dtype before they weigh
  values. Source: model.md section 2.4.

  Args:
    q_BQHd: rotated queries.
    window_kv_BQd: one key per query slot.
    entry_kv_BNd: compressed entries; None for window only, and then selection_BQK too.
    selection_BQK: int32 entry ids, ascending, -1 at the end.
    segment_start_BQ: int32 first slot that a query may reach.
    sink_H: float32 logit of the sink.
    window: slots, the query's own included.
    plan: plan_selection of the same arguments; None makes it here, again in every layer.
    with_teacher: also return the head-summed probability of every chosen entry.
    implementation: a name, or None for the best one on this device.

  Every row must be finite, also where nobody sees it: a kernel may multiply it by 0.

  Raises: NotImplementedError where a named implementation cannot take the shapes or the device;
    ValueError for a window below 1 and for a plan of other shapes.
  """
  if window < 1:
    raise ValueError(f"window is {window}, accepted are 1, 2, ...")
  choices = 0 if selection_BQK is None else selection_BQK.shape[-1]
  has_entries = entry_kv_BNd is not None and entry_kv_BNd.shape[1] > 0
  if not has_entries:
    entry_kv_BNd = selection_BQK = plan = None
  attend = functools.partial(
    dispatch.call,
    _IMPLEMENTATIONS,
    implementation,
    window=window,
    with_teacher=with_teacher and has_entries,
    slow=tiles.slow(q_BQHd),
  )
  sink_H = jnp.clip(sink_H.astype(jnp.float32), -_LARGEST_SINK, _LARGEST_SINK)
  run = functools.partial(_attend_own, attend, window)
  slots = q_BQHd, window_kv_BQd, selection_BQK, segment_start_BQ
  attended = Attended(
    *by_slots(
      run,
      slots,
      rows=entry_kv_BNd,
      pieces=plan,
      weights=[(sink_H, (None,))],
      dtype=jnp.float32,
    )
  )
  if with_teacher and not has_entries:
    return attended._replace(teacher_BQK=jnp.zeros((*q_BQHd.shape[:2], choices), jnp.float32))
  return attended


def _attend_own(attend, window: int, place: Place, slots, entry_kv_BNd, plan, weights):
  """Attention of the slots of one device, whose first windows reach into its neighbour's.

  A kernel has one window key for every query, so the neighbour's keys come with queries that see
  nothing, whose results are dropped: window - 1 of several thousand.
  """
  q_BQHd, window_kv_BQd, selection_BQK, segment_start_BQ = slots
  halo = place.halo(window - 1)
  if halo:
    queries = q_BQHd.shape[1]
    segment_start_BQ = jnp.maximum(segment_start_BQ - place.begin(queries) + halo, 0)
    segment_start_BQ = _behind(segment_start_BQ, halo, fill=queries + halo)
    selection_BQK = None if selection_BQK is None else _behind(selection_BQK, halo, fill=-1)
    q_BQHd, window_kv_BQd = _behind(q_BQHd, halo), place.with_halo(window_kv_BQd, halo)
  attended = attend(
    q_BQHd, window_kv_BQd, entry_kv_BNd, selection_BQK, segment_start_BQ, *weights, plan=plan
  )
  return jax.tree.map(lambda x_BQ: x_BQ[:, halo:], attended)
