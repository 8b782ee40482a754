"""Rows to their owners and back over 8 devices. Legend: n devices, Y rows, C capacity."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from deepseek_jax.ops import exchange

N, ROWS = 8, 40
MESHES = {"one axis": ((8,), ("a",)), "two axes": ((4, 2), ("a", "b"))}
TABLES = {
  "mixed": np.random.default_rng(0).integers(0, 6, (N, N)),
  "one takes all": np.eye(N, dtype=int)[np.full(N, 3)] * np.arange(12, 20)[:, None],
  "nobody sends": np.zeros((N, N), int),
  "only to the next": np.roll(np.eye(N, dtype=int), 1, axis=1) * 7,
}
every_table = pytest.mark.parametrize("table", TABLES)


def queues(rows_nY, sizes_nn):
  """Plain Python: the rows in every destination's queue."""
  ends_nn = np.cumsum(sizes_nn, axis=1)
  piece = lambda s, d: rows_nY[s, ends_nn[s, d] - sizes_nn[s, d] : ends_nn[s, d]]
  return [np.concatenate([piece(s, d) for s in range(N)]) for d in range(N)]


def on_devices(mesh_name, fn):
  """fn(axis, rows of one device, sizes_nn, round) on every device."""
  shape, names = MESHES[mesh_name]
  mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
  axis = names if len(names) > 1 else names[0]
  local = lambda x_1Y, *args: fn(axis, x_1Y[0], *args)[None]
  specs = {"in_specs": (P(names), P(), P()), "out_specs": P(names)}
  return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))


def there(axis, x_Y, sizes_nn, round_, *, capacity):
  here = exchange.segments(sizes_nn, jax.lax.axis_index(axis), round_, capacity)
  return exchange.there(x_Y, here, axis, capacity)


def back(axis, y_C, sizes_nn, round_):
  here = exchange.segments(sizes_nn, jax.lax.axis_index(axis), round_, len(y_C))
  return exchange.back(y_C, here, axis, ROWS)


@every_table
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("capacity", [5, 64])
def test_rounds_bring_every_row_of_the_queue_in_order_and_home_again(table, mesh_name, capacity):
  sizes_nn = TABLES[table].astype(np.int32)
  x_nY = 1 + np.arange(N * ROWS, dtype=np.int32).reshape(N, ROWS)
  go = on_devices(mesh_name, functools.partial(there, capacity=capacity))
  come = on_devices(mesh_name, back)
  rounds = int(exchange.rounds(sizes_nn, capacity))
  assert rounds == max(-(-len(q) // capacity) for q in queues(x_nY, sizes_nn))
  received, returned = np.zeros((N, 0), np.int32), np.zeros_like(x_nY)
  for r in range(rounds + 1):  # the last one is empty
    buffer_nC = np.asarray(go(x_nY, sizes_nn, r))
    received = np.concatenate([received, buffer_nC], axis=1)
    returned += np.asarray(come(np.where(buffer_nC == 0, 999, buffer_nC), sizes_nn, r))
  for got, queue in zip(received, queues(x_nY, sizes_nn), strict=True):
    np.testing.assert_array_equal(got, np.pad(queue, (0, len(got) - len(queue))))
  sent = np.arange(ROWS) < sizes_nn.sum(axis=1)[:, None]
  np.testing.assert_array_equal(returned, np.where(sent, x_nY, 0))


@every_table
def test_there_and_back_are_transposes_and_each_other_s_gradient(table):
  sizes_nn, capacity, round_ = TABLES[table].astype(np.int32), 13, 1
  whole = lambda seed, *shape: np.random.default_rng(seed).integers(-9, 10, shape)
  x = whole(0, N, ROWS, 3).astype(np.float32)
  y = whole(1, N, capacity, 3).astype(np.float32)
  go = on_devices("two axes", functools.partial(there, capacity=capacity))
  come = on_devices("two axes", back)
  gone, gone_vjp = jax.vjp(lambda x: go(x, sizes_nn, round_), x)
  home, home_vjp = jax.vjp(lambda y: come(y, sizes_nn, round_), y)
  assert np.sum(gone * y) == np.sum(x * home)
  np.testing.assert_array_equal(gone_vjp(y)[0], home)
  np.testing.assert_array_equal(home_vjp(x)[0], gone)
