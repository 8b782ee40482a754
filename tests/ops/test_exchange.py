"""Rows to their owners and back over 8 devices. Legend as in exchange.py."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deepseek_jax.ops import exchange
from tests.thinned import rest_slow

N, ROWS = 8, 40
MESHES = {"one axis": ((8,), ("a",)), "two axes": ((4, 2), ("a", "b"))}
TABLES = {
  "mixed": np.random.default_rng(0).integers(0, 6, (N, N)),
  "one takes all": np.eye(N, dtype=int)[np.full(N, 3)] * np.arange(12, 20)[:, None],
  "nobody sends": np.zeros((N, N), int),
  "only to the next": np.roll(np.eye(N, dtype=int), 1, axis=1) * 7,
}
every_table = pytest.mark.parametrize("table", TABLES)
every_layout = pytest.mark.parametrize(("runs", "block"), [(1, 1), (3, 1), (3, 4)])


def sizes_of(table, runs):
  """int32 [n, n, runs]: what a pair exchanges, cut into runs at random, some of them empty."""
  rng = np.random.default_rng(1)
  cut = lambda size: rng.multinomial(size, rng.dirichlet(np.full(runs, 0.5)))
  return np.array([[cut(size) for size in row] for row in TABLES[table]], np.int32)


def queues(rows_nY, sizes_nnL):
  """Plain Python: the rows in every destination's queue, with their runs."""
  ends = np.cumsum(sizes_nnL.reshape(N, -1), axis=1).reshape(sizes_nnL.shape)
  piece = lambda s, d, r: rows_nY[s, ends[s, d, r] - sizes_nnL[s, d, r] : ends[s, d, r]]
  runs = range(sizes_nnL.shape[2])
  return [
    [(r, int(row)) for r in runs for s in range(N) for row in piece(s, d, r)] for d in range(N)
  ]


def laid_out(queue, runs, block, length):
  """Plain Python: a buffer in which every run begins at a multiple of the block."""
  buffer = []
  for run in range(runs):
    rows = [row for r, row in queue if r == run]
    buffer += rows + [0] * (-len(rows) % block)
  return np.pad(np.array(buffer, int), (0, length - len(buffer)))


def on_devices(mesh_name, fn):
  """fn(axis, rows of one device, sizes_nnL, round) on every device."""
  shape, names = MESHES[mesh_name]
  mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
  axis = names if len(names) > 1 else names[0]
  local = lambda x_1Y, *args: fn(axis, x_1Y[0], *args)[None]
  cut, whole = PartitionSpec(names), PartitionSpec()
  specs = {"in_specs": (cut, whole, whole), "out_specs": cut}
  return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))


def there(axis, x_Y, sizes_nnL, round_, *, capacity, block=1):
  me = jax.lax.axis_index(axis)
  here = exchange.segments(sizes_nnL, me, round_, capacity, block)
  rows = exchange.buffer_rows(capacity, sizes_nnL.shape[2], block)
  return exchange.there(x_Y, here, axis, rows)


def back(axis, y_P, sizes_nnL, round_, *, capacity, block=1):
  me = jax.lax.axis_index(axis)
  here = exchange.segments(sizes_nnL, me, round_, capacity, block)
  return exchange.back(y_P, here, axis, ROWS)


@every_table
@every_layout
@pytest.mark.parametrize("mesh_name", rest_slow(list(MESHES)[::-1], 1))
@pytest.mark.parametrize("capacity", [5, 64])
def test_rounds_bring_every_row_of_the_queue_in_order_and_home_again(
  table, mesh_name, capacity, runs, block
):
  sizes_nnL = sizes_of(table, runs)
  x_nY = 1 + np.arange(N * ROWS, dtype=np.int32).reshape(N, ROWS)
  go, come = (
    on_devices(mesh_name, functools.partial(fn, capacity=capacity, block=block))
    for fn in (there, back)
  )
  rounds = int(exchange.rounds(sizes_nnL, capacity))
  waiting = queues(x_nY, sizes_nnL)
  assert rounds == max(-(-len(queue) // capacity) for queue in waiting)
  returned = np.zeros_like(x_nY)
  for r in range(rounds + 1):  # the last one is empty
    buffer_nP = np.asarray(go(x_nY, sizes_nnL, r))
    for got, queue in zip(buffer_nP, waiting, strict=True):
      of_round = queue[r * capacity : (r + 1) * capacity]
      np.testing.assert_array_equal(got, laid_out(of_round, runs, block, len(got)))
    returned += np.asarray(come(np.where(buffer_nP == 0, 999, buffer_nP), sizes_nnL, r))
  sent = np.arange(ROWS) < sizes_nnL.sum(axis=(1, 2))[:, None]
  np.testing.assert_array_equal(returned, np.where(sent, x_nY, 0))


@every_table
@every_layout
def test_there_and_back_are_transposes_and_each_other_s_gradient(table, runs, block):
  sizes_nnL, round_ = sizes_of(table, runs), 1
  options = {"capacity": 13, "block": block}
  whole = lambda seed, *shape: np.random.default_rng(seed).integers(-9, 10, shape)
  x = whole(0, N, ROWS, 3).astype(np.float32)
  y = whole(1, N, exchange.buffer_rows(13, runs, block), 3).astype(np.float32)
  go = on_devices("two axes", functools.partial(there, **options))
  come = on_devices("two axes", functools.partial(back, **options))
  gone, gone_vjp = jax.vjp(lambda x: go(x, sizes_nnL, round_), x)
  home, home_vjp = jax.vjp(lambda y: come(y, sizes_nnL, round_), y)
  assert np.sum(gone * y) == np.sum(x * home)
  np.testing.assert_array_equal(gone_vjp(y)[0], home)
  np.testing.assert_array_equal(home_vjp(x)[0], gone)
