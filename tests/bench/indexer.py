"""The indexer: a selection among all visible entries, one among a pool, and the divergence.

Legend: B = 1 row, Q queries, I indexer heads, i indexer width, N entry cells, K chosen entries,
W pool blocks.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.ops import indexer
from tests.bench import measure
from tests.bench.case import Case, Request, Sizes

IMPLEMENTATIONS = ("pallas_gpu", "pallas_tpu", "xla", "reference")


def cases(request: Request) -> Iterator[Case]:
  for queries in request.tokens:
    for ratio in request.ratios:
      yield from _of_shape(request, queries, queries // ratio)


def _of_shape(request: Request, queries: int, entries: int) -> Iterator[Case]:
  sizes = request.sizes
  shape = {"queries": queries, "entries": entries}
  normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
  q_BQIi = normal(0, 1, queries, sizes.indexer_heads, sizes.indexer_width)
  keys_BNi = normal(1, 1, entries, sizes.indexer_width)
  weights_BQI = normal(2, 1, queries, sizes.indexer_heads)
  end_BQ = (jnp.arange(queries, dtype=jnp.int32)[None] + 1) // (queries // entries)
  visible = indexer.Visible(jnp.ones((1, entries), bool), jnp.zeros_like(end_BQ), end_BQ)
  arrays = q_BQIi, keys_BNi, weights_BQI
  pool_BQW = _pool(sizes, end_BQ)
  chosen = _spread(sizes.chosen, end_BQ)
  for name in request.implementations_for(queries):
    yield _full(sizes, shape, name, arrays, visible)
    yield _in_pool(sizes, shape, name, arrays, visible, pool_BQW)
    yield _divergence(sizes, shape, name, arrays, chosen)


def _choice(sizes: Sizes) -> indexer.Choice:
  return indexer.Choice(sizes.chosen, block_size=sizes.pool_block_size)


def _flops_per_score(sizes: Sizes) -> float:
  return 2.0 * sizes.indexer_heads * sizes.indexer_width


def _full(sizes, shape, name, arrays, visible) -> Case:
  def run(arrays, visible):
    return indexer.select(*arrays, visible, _choice(sizes), implementation=name).selection_BQK

  flops = _flops_per_score(sizes) * int(np.asarray(visible.end_BQ).sum(dtype=np.int64))
  return Case(
    shape, name, "select", run, lambda: (arrays, visible), flops,
    errors=lambda program: _missed(sizes, arrays, visible, program(arrays, visible)),
  )  # fmt: skip


def _in_pool(sizes, shape, name, arrays, visible, pool_BQW) -> Case:
  def run(arrays, visible, pool_BQW):
    choice = _choice(sizes)
    selected = indexer.select(*arrays, visible, choice, pool_BQW=pool_BQW, implementation=name)
    return selected.selection_BQK

  members = int(jnp.sum(pool_BQW >= 0)) * sizes.pool_block_size
  return Case(
    shape, name, "select in pool", run, lambda: (arrays, visible, pool_BQW),
    _flops_per_score(sizes) * members,
    errors=lambda program: _missed(
      sizes, arrays, visible, program(arrays, visible, pool_BQW), pool_BQW
    ),
  )  # fmt: skip


def _divergence(sizes, shape, name, arrays, chosen_BQK) -> Case:
  teacher_BQK = jnp.where(
    chosen_BQK >= 0, jax.random.uniform(jax.random.key(3), chosen_BQK.shape), 0.0
  )

  def run(implementation, arrays, chosen_BQK, teacher_BQK):
    counts_BQ = jnp.ones(chosen_BQK.shape[:2], bool)
    loss = lambda *arrays: indexer.divergence(
      *arrays, chosen_BQK, teacher_BQK, counts_BQ, implementation=implementation
    )
    return jax.value_and_grad(loss, (0, 1, 2))(*arrays)

  def errors(_):
    """Of the last queries alone, since the value and the keys' gradient are sums over queries."""
    few = arrays[0][:, -sizes.checked :], arrays[1], arrays[2][:, -sizes.checked :]
    choices = chosen_BQK[:, -sizes.checked :], teacher_BQK[:, -sizes.checked :]
    got = jax.tree.leaves(jax.jit(functools.partial(run, name))(few, *choices))
    want = jax.tree.leaves(_exactly(lambda arrays: run("reference", arrays, *choices), few))
    names = ("value", "d_q", "d_keys", "d_weights")
    return {n: measure.relative_error(g, w) for n, g, w in zip(names, got, want, strict=True)}

  flops = 3 * _flops_per_score(sizes) * int(jnp.sum(chosen_BQK >= 0))
  return Case(
    shape, name, "divergence forward+backward", functools.partial(run, name),
    lambda: (arrays, chosen_BQK, teacher_BQK), flops, errors=errors,
  )  # fmt: skip


def _spread(count: int, end_BQ) -> jax.Array:
  """[1, Q, count] ids below each query's end, ascending, evenly spread, -1 at the end."""
  rank = jnp.arange(count, dtype=jnp.int32)
  available_BQ1 = jnp.minimum(end_BQ, count)[..., None]
  width_BQ1 = end_BQ[..., None] // jnp.maximum(available_BQ1, 1)
  return jnp.where(rank < available_BQ1, rank * width_BQ1, -1)


def _pool(sizes: Sizes, end_BQ) -> jax.Array:
  return _spread(sizes.pool_blocks, -(-end_BQ // sizes.pool_block_size))


def _missed(sizes: Sizes, arrays, visible, selection_BQK, pool_BQW=None) -> dict[str, float]:
  """Share of the float32 choices of the last queries that were not made."""
  last = lambda x: x[:, -sizes.checked :]
  q_BQIi, keys_BNi, weights_BQI = arrays
  few = indexer.Visible(visible.exists_BN, last(visible.begin_BQ), last(visible.end_BQ))
  pool = None if pool_BQW is None else last(pool_BQW)
  want = _exactly(
    lambda arrays: (
      indexer.select(
        *arrays, few, _choice(sizes), pool_BQW=pool, implementation="reference"
      ).selection_BQK
    ),
    (last(q_BQIi), keys_BNi, last(weights_BQI)),
  )
  pairs = zip(np.asarray(last(selection_BQK))[0], np.asarray(want)[0], strict=True)
  missed = [len(np.setdiff1d(w[w >= 0], got)) / max(np.sum(w >= 0), 1) for got, w in pairs]
  return {"missed_choices": float(np.mean(missed))}


def _exactly(run, arrays):
  """run with float32 inputs and products."""
  with jax.default_matmul_precision("highest"):
    return jax.jit(run)(jax.tree.map(lambda x: x.astype(jnp.float32), arrays))
