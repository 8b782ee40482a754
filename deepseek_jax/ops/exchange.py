"""Rows travel to the device that owns them and back, inside shard_map, in buffers of fixed size.

Every device holds its rows sorted by destination. What all of them send to one destination forms
its queue, source after source. In round r a destination receives places r * capacity up to
(r + 1) * capacity of its queue, so that memory is bounded for any load and no row is dropped.
Going there and coming back are each other's transpose, hence each other's gradient.

Legend: n devices (also sources and destinations), Y rows of a device, C capacity, J rows of a pair.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch

Axis = str | tuple[str, ...]  # of the mesh; of a tuple the first is the major one
Body = Literal["ragged", "dense"]


class Segments(NamedTuple):
  """What one device sends and receives in one round, int32 [n] each."""

  begin_n: jax.Array  # first of my rows that goes to each destination
  size_n: jax.Array  # how many
  place_n: jax.Array  # where they begin in the destination's buffer
  from_begin_n: jax.Array  # where the rows of each source begin in my buffer
  from_size_n: jax.Array
  from_place_n: jax.Array  # first of the source's rows


def rounds(sizes_nn: jax.Array, capacity: int) -> jax.Array:
  """int32 []: rounds until the longest queue is empty; sizes_nn[source, destination]."""
  return jnp.max(-(-jnp.sum(sizes_nn, axis=0) // capacity)).astype(jnp.int32)


def segments(sizes_nn: jax.Array, me: jax.Array, round_: jax.Array | int, capacity: int):
  """Segments of device `me` in a round.

  Args:
    sizes_nn: int32 rows that each source has for each destination, the same on all devices.
    me: int32 [], `jax.lax.axis_index` of the axis.
    round_: int32 [], from 0.
    capacity: rows of a buffer.
  """
  in_rows_nn = jnp.cumsum(sizes_nn, axis=1) - sizes_nn  # where a segment begins at its source
  in_queue_nn = jnp.cumsum(sizes_nn, axis=0) - sizes_nn  # and in its destination's queue
  start = round_ * capacity
  first_nn = jnp.clip(start - in_queue_nn, 0, sizes_nn)
  size_nn = jnp.clip(start + capacity - in_queue_nn, 0, sizes_nn) - first_nn
  begin_nn = in_rows_nn + first_nn
  place_nn = jnp.clip(in_queue_nn + first_nn - start, 0, capacity)
  mine = lambda x_nn: x_nn[me].astype(jnp.int32)
  to_me = lambda x_nn: x_nn[:, me].astype(jnp.int32)
  return Segments(
    mine(begin_nn), mine(size_nn), mine(place_nn), to_me(place_nn), to_me(size_nn), to_me(begin_nn)
  )


def there(
  x_Y: jax.Array, segments: Segments, axis: Axis, capacity: int, implementation: Body | None = None
) -> jax.Array:
  """This round's rows of all sources: [Y, ...] -> [C, ...].

  Args:
    x_Y: rows sorted by destination; any dtype, any further axes.
    segments: of this device and round.
    axis: along which the n devices lie.
    capacity: C.
    implementation: "ragged" (GPU and TPU) or "dense", which pads what a pair of devices exchanges
      to C rows; None picks.

  Returns: rows ordered by source and then as they lay there; zero in places that stay empty.
  """
  return _there(x_Y, segments, axis, capacity, implementation or _body())


def back(
  y_C: jax.Array, segments: Segments, axis: Axis, rows: int, implementation: Body | None = None
) -> jax.Array:
  """The reverse of `there`: [C, ...] -> [Y, ...], zero for rows that were not in this round.

  Args:
    y_C: one row for each that `there` returned; what lies in empty places does not matter.
    segments, axis, implementation: as for `there`.
    rows: Y.
  """
  return _back(y_C, segments, axis, rows, implementation or _body())


def _body() -> Body:
  return "dense" if dispatch.device().platform == "cpu" else "ragged"  # XLA has none for the CPU


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _there(x_Y, s: Segments, axis, capacity, body):
  move = _ragged if body == "ragged" else _dense
  outgoing = s.begin_n, s.size_n, s.place_n
  return move(x_Y, outgoing, (s.from_begin_n, s.from_size_n), axis, capacity)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _back(y_C, s: Segments, axis, rows, body):
  move = _ragged if body == "ragged" else _dense
  outgoing = s.from_begin_n, s.from_size_n, s.from_place_n
  return move(y_C, outgoing, (s.begin_n, s.size_n), axis, rows)


def _there_backward(axis, capacity, body, saved, d_C):
  del capacity
  segments, rows = saved
  return _back(d_C, segments, axis, len(rows), body), None


def _back_backward(axis, rows, body, saved, d_Y):
  del rows
  segments, capacity = saved
  return _there(d_Y, segments, axis, len(capacity), body), None


def _length(x: jax.Array) -> jax.Array:
  return jnp.zeros((len(x), 0))  # carries a size to the backward pass


_there.defvjp(
  lambda x, segments, *options: (_there(x, segments, *options), (segments, _length(x))),
  _there_backward,
)
_back.defvjp(
  lambda y, segments, *options: (_back(y, segments, *options), (segments, _length(y))),
  _back_backward,
)


def _ragged(x, outgoing, incoming, axis, length):
  begin_n, size_n, place_n = outgoing
  out = jnp.zeros((length, *x.shape[1:]), x.dtype)
  return jax.lax.ragged_all_to_all(x, out, begin_n, size_n, place_n, incoming[1], axis_name=axis)


def _dense(x, outgoing, incoming, axis, length):
  """Every pair exchanges as many rows as the smaller of both buffers has."""
  (begin_n, size_n, _), (into_n, incoming_n) = outgoing, incoming
  row_J = jnp.arange(min(len(x), length))
  sent = _rows(x, begin_n[:, None] + row_J, row_J < size_n[:, None])
  received = jax.lax.all_to_all(sent, axis, 0, 0)
  # What comes in lies in order: a place belongs to the first segment that ends behind it.
  place = jnp.arange(length)
  source = jnp.minimum(jnp.searchsorted(into_n + incoming_n, place, side="right"), len(into_n) - 1)
  row = place - into_n[source]
  filled = (row >= 0) & (row < incoming_n[source])
  flat = received.reshape(-1, *received.shape[2:])
  return _rows(flat, source * len(row_J) + row, filled)


def _rows(x, index, exists):
  """x[index], zero where the row does not exist."""
  taken = x[jnp.where(exists, index, 0)]
  return jnp.where(exists.reshape(exists.shape + (1,) * (x.ndim - 1)), taken, 0)
