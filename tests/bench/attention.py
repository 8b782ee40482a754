"""Sparse attention: its plan, forward, forward and backward, and the memory of one layer.

Legend: B = 1 row, Q queries, H heads, d head width, N entry cells, K chosen entries.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops.sparse_attention import plan_selection, sparse_attention
from tests.bench import measure
from tests.bench.case import Case, Request, Sizes

IMPLEMENTATIONS = ("pallas_gpu", "pallas_triton", "pallas_tpu", "reference")
_HEADLINE = (16_384, 32_768)  # queries and entries at which speeds are usually quoted
_STEADY = 10  # queries for which a clustered choice stays: neighbours share nine tenths


class _Inputs(NamedTuple):
  q_BQHd: jax.Array
  window_kv_BQd: jax.Array
  entry_kv_BNd: jax.Array
  sink_H: jax.Array
  selection_BQK: jax.Array
  segment_start_BQ: jax.Array


def cases(request: Request) -> Iterator[Case]:
  """Every shape and implementation; then what a layer of the longest one holds."""
  sizes = request.sizes
  shapes = [(queries, queries // ratio) for queries in request.tokens for ratio in request.ratios]
  if _HEADLINE[0] in request.tokens:
    shapes.append(_HEADLINE)
  for queries, entries in shapes:
    for kind in request.selections:
      shape = {"queries": queries, "entries": entries, "selection": kind}
      inputs = _inputs(sizes, queries, entries, kind)
      for name in request.implementations_for(queries):
        yield from _of_implementation(sizes, shape, name, inputs)
  longest = {"queries": max(request.tokens), "entries": max(request.tokens) // min(request.ratios)}
  shapes = jax.eval_shape(lambda: _inputs(sizes, *longest.values(), "random"))
  for name in request.implementations_for(longest["queries"]):
    yield _layer(sizes, longest, name, shapes)


def _inputs(sizes: Sizes, queries: int, entries: int, kind: str) -> _Inputs:
  normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
  return _Inputs(
    normal(0, 1, queries, sizes.heads, sizes.width),
    normal(1, 1, queries, sizes.width),
    normal(2, 1, entries, sizes.width),
    jax.random.normal(jax.random.key(3), (sizes.heads,)),
    _selection(queries, entries, sizes.chosen, kind),
    jnp.zeros((1, queries), jnp.int32),
  )


def _selection(queries: int, entries: int, chosen: int, kind: str) -> jax.Array:
  """[1, Q, K]: one entry of each of K equal ranges of ids, so that ids ascend and none repeats."""
  count = min(chosen, entries)
  width, rank_K = entries // count, jnp.arange(count)
  random = functools.partial(jax.random.randint, jax.random.key(4), minval=0, maxval=width)
  if kind == "random":
    offset_QK = random((queries, count))
  else:
    kept_QK = (jnp.arange(queries)[:, None] + rank_K % _STEADY) // _STEADY
    offset_QK = random((queries // _STEADY + 2, count))[kept_QK, rank_K]
  ids_QK = rank_K * width + offset_QK
  return jnp.pad(ids_QK, ((0, 0), (0, chosen - count)), constant_values=-1)[None].astype(jnp.int32)


def _attend(sizes: Sizes, implementation: str, arrays, plan):
  q, window_kv, entry_kv, sink, selection, segment_start = arrays
  attended = sparse_attention(
    q, window_kv, entry_kv, selection, segment_start, sink,
    window=sizes.window, plan=plan, implementation=implementation,
  )  # fmt: skip
  return attended.out_BQHd, attended.lse_BQH


def _leading(sizes: Sizes, implementation: str, arrays, plan):
  """out as a function of queries, window, entries and sink, and these four."""
  attend = lambda *leading: _attend(sizes, implementation, (*leading, *arrays[4:]), plan)[0]
  return attend, *arrays[:4]


def _forward_and_backward(sizes, implementation, arrays, plan, d_out_BQHd):
  out_BQHd, gradients = jax.vjp(*_leading(sizes, implementation, arrays, plan))
  return out_BQHd, *gradients(d_out_BQHd)


def _plan(sizes: Sizes, implementation: str, arrays: _Inputs):
  return plan_selection(
    arrays.selection_BQK, arrays.entry_kv_BNd, arrays.q_BQHd,
    window=sizes.window, implementation=implementation,
  )  # fmt: skip


def _of_implementation(sizes, shape, name, inputs) -> Iterator[Case]:
  make_plan = lambda arrays: _plan(sizes, name, arrays)
  plan = functools.cache(lambda: jax.jit(make_plan)(inputs))
  attend = lambda arrays, plan: _attend(sizes, name, arrays, plan)
  both = functools.partial(_forward_and_backward, sizes, name)
  check, flops = _Check(sizes, inputs), _forward_flops(sizes, shape)

  def saved_by_forward():
    run = jax.jit(lambda arrays, plan: jax.vjp(*_leading(sizes, name, arrays, plan))[1])
    return run(inputs, plan()), check.d_out()

  yield Case(shape, name, "plan", make_plan, lambda: (inputs,), 0.0)
  yield Case(
    shape, name, "forward", attend, lambda: (inputs, plan()), flops,
    errors=lambda program: check.forward(*program(inputs, plan())),
  )  # fmt: skip
  backward = lambda gradients, d_out_BQHd: gradients(d_out_BQHd)
  yield Case(shape, name, "backward", backward, saved_by_forward, 2.5 * flops)
  yield Case(
    shape, name, "forward+backward", both, lambda: (inputs, plan(), check.d_out()), 3.5 * flops,
    errors=lambda program: check.backward(*program(inputs, plan(), check.d_out(only_checked=True))),
  )  # fmt: skip


def _forward_flops(sizes: Sizes, shape) -> float:
  """Two products over every visible key; the backward pass makes five of that size."""
  queries, entries = shape["queries"], shape["entries"]
  filled = min(queries, sizes.window)
  window_keys = queries * sizes.window - filled * (2 * sizes.window - filled - 1) // 2
  keys = queries * min(sizes.chosen, entries) + window_keys
  return 4.0 * keys * sizes.heads * sizes.width


def _layer(sizes, shape, name, shapes) -> Case:
  """Compiled only: value and gradient of a layer, its plan included."""

  def layer(arrays, d_out_BQHd):
    return _forward_and_backward(sizes, name, arrays, _plan(sizes, name, arrays), d_out_BQHd)

  return Case(shape, name, "layer", layer, lambda: (shapes, shapes.q_BQHd), 0.0, timed=False)


class _Check:
  """Some queries in the middle, and a float32 reference that sees these and their window only."""

  def __init__(self, sizes: Sizes, inputs: _Inputs):
    self.sizes, self.inputs = sizes, inputs
    queries = inputs.q_BQHd.shape[1]
    self.first = queries // 2
    self.end = min(self.first + sizes.checked, queries)
    self.begin = max(self.first - sizes.window, 0)

  def d_out(self, *, only_checked: bool = False) -> jax.Array:
    shape = self.inputs.q_BQHd.shape
    d_out_BQHd = jax.random.normal(jax.random.key(5), shape, jnp.bfloat16)
    slot_Q11 = jnp.arange(shape[1])[:, None, None]
    inside = (slot_Q11 >= self.first) & (slot_Q11 < self.end)
    return jnp.where(inside, d_out_BQHd, 0) if only_checked else d_out_BQHd

  def forward(self, out_BQHd, lse_BQH) -> dict[str, float]:
    want = self._exactly(lambda arrays: _attend(self.sizes, "reference", arrays, None))
    return _errors(("out", "lse"), map(self._checked, (out_BQHd, lse_BQH)), want)

  def backward(self, out_BQHd, d_q, d_window_kv, d_entry_kv, d_sink) -> dict[str, float]:
    d_out_BQHd = self.d_out(only_checked=True)[:, self.begin : self.end].astype(jnp.float32)
    want = self._exactly(
      lambda arrays: _forward_and_backward(self.sizes, "reference", arrays, None, d_out_BQHd)
    )
    reached = d_window_kv[:, self.begin : self.end]
    got = self._checked(out_BQHd), self._checked(d_q), reached, d_entry_kv, d_sink
    return _errors(("out", "d_q", "d_window_kv", "d_entry_kv", "d_sink"), got, want)

  def _checked(self, x_BQ):
    return x_BQ[:, self.first : self.end]

  def _exactly(self, run: Callable):
    """run on float32 copies of the checked part; queries before the checked ones are cut off."""
    part = lambda x: x[:, self.begin : self.end]
    wide = lambda x: x.astype(jnp.float32)
    q, window_kv, entry_kv, sink, selection, segment_start = self.inputs
    starts = jnp.maximum(part(segment_start) - self.begin, 0)
    arrays = _Inputs(
      wide(part(q)), wide(part(window_kv)), wide(entry_kv), sink, part(selection), starts
    )
    with jax.default_matmul_precision("highest"):
      first, second, *rest = jax.jit(run)(arrays)
    cut = lambda x: x[:, self.first - self.begin :]
    return cut(first), cut(second), *rest


def _errors(names, got, want) -> dict[str, float]:
  return {name: measure.relative_error(g, w) for name, g, w in zip(names, got, want, strict=True)}
