"""Rows travel to the device that owns them and back, inside shard_map, in buffers of fixed size.

What one device has for another is a number of runs, for instance one for each expert there. Every
device holds its rows sorted by destination and run. What all of them send to one destination forms
its queue: run after run, and within a run source after source. In round r a destination receives
places r * capacity up to (r + 1) * capacity of its queue, so that memory is bounded for any load
and no row is dropped. What belongs to a run lies together in the buffer, behind a multiple of
`block` rows. Going there and coming back are each other's transpose, hence each other's gradient.

Legend: n devices (also sources and destinations), L runs of a pair, R = n L runs, device after
device, Y rows of a device, P rows of a buffer, J rows of a pair.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.ops import dispatch

Axis = str | tuple[str, ...]  # of the mesh; of a tuple the first is the major one
Body = Literal["ragged", "dense"]


class Segments(NamedTuple):
  """What one device sends and receives in one round; int32 [R] but for the last."""

  begin_R: jax.Array  # first of my rows in each run of each destination
  size_R: jax.Array  # how many
  place_R: jax.Array  # where they begin in the destination's buffer
  from_begin_R: jax.Array  # where the rows of each source's runs begin in my buffer
  from_size_R: jax.Array
  from_place_R: jax.Array  # first of the source's rows
  rows_L: jax.Array  # int32 [L], rows of my buffer that belong to each run, multiples of the block


def rounds(sizes_nnL: jax.Array, capacity: int) -> jax.Array:
  """int32 []: rounds until the longest queue is empty; sizes_nnL[source, destination, run]."""
  return jnp.max(-(-jnp.sum(sizes_nnL, axis=(0, 2)) // capacity)).astype(jnp.int32)


def buffer_rows(capacity: int, runs: int, block: int) -> int:
  """P that suffices for any load: each run wastes less than one block."""
  return (capacity + runs * (block - 1)) // block * block


def segments(
  sizes_nnL: jax.Array, me: jax.Array, round_: jax.Array | int, capacity: int, block: int = 1
) -> Segments:
  """Segments of device `me` in a round.

  Args:
    sizes_nnL: int32 rows that each source has for each run of each destination, the same on all
      devices.
    me: int32 [], `jax.lax.axis_index` of the axis.
    round_: int32 [], from 0.
    capacity: rows that a destination receives in a round.
    block: rows that the place of a run in the buffer is a multiple of.
  """
  before = lambda x, axis: jnp.cumsum(x, axis=axis) - x
  run_nL = jnp.sum(sizes_nnL, axis=0)
  in_queue_nnL = before(run_nL, 1) + before(sizes_nnL, 0)
  start = round_ * capacity
  first_nnL = jnp.clip(start - in_queue_nnL, 0, sizes_nnL)
  size_nnL = jnp.clip(start + capacity - in_queue_nnL, 0, sizes_nnL) - first_nnL
  in_rows_nnL = before(sizes_nnL.reshape(len(sizes_nnL), -1), 1).reshape(sizes_nnL.shape)
  begin_nnL = in_rows_nnL + first_nnL
  rows_nL = -(-jnp.sum(size_nnL, axis=0) // block) * block
  place_nnL = before(rows_nL, 1) + before(size_nnL, 0)
  mine = lambda x_nnL: x_nnL[me].reshape(-1).astype(jnp.int32)
  to_me = lambda x_nnL: x_nnL[:, me].reshape(-1).astype(jnp.int32)
  return Segments(
    *map(mine, (begin_nnL, size_nnL, place_nnL)),
    *map(to_me, (place_nnL, size_nnL, begin_nnL)),
    rows_L=rows_nL[me].astype(jnp.int32),
  )


def there(
  x_Y: jax.Array, segments: Segments, axis: Axis, rows: int, implementation: Body | None = None
) -> jax.Array:
  """This round's rows of all sources: [Y, ...] -> [P, ...].

  Args:
    x_Y: rows sorted by destination and run; any dtype, any further axes.
    segments: of this device and round.
    axis: along which the n devices lie.
    rows: P, from `buffer_rows`.
    implementation: "ragged" (GPU and TPU) or "dense", which pads what a pair of devices exchanges
      to Y or P rows, whichever is less; None picks.

  Returns: rows ordered by run, source, and as they lay there; zero in places that stay empty.
  """
  return _there(x_Y, segments, axis, rows, implementation or _body())


def back(
  y_P: jax.Array, segments: Segments, axis: Axis, rows: int, implementation: Body | None = None
) -> jax.Array:
  """The reverse of `there`: [P, ...] -> [Y, ...], zero for rows that were not in this round.

  Args:
    y_P: one row for each that `there` returned; what lies in empty places does not matter.
    segments, axis, implementation: as for `there`.
    rows: Y.
  """
  return _back(y_P, segments, axis, rows, implementation or _body())


def _body() -> Body:
  return "dense" if dispatch.device().platform == "cpu" else "ragged"  # XLA has none for the CPU


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _there(x_Y, s: Segments, axis, rows, body):
  move = _ragged if body == "ragged" else _dense
  outgoing = s.begin_R, s.size_R, s.place_R
  return move(x_Y, outgoing, (s.from_begin_R, s.from_size_R), axis, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _back(y_P, s: Segments, axis, rows, body):
  move = _ragged if body == "ragged" else _dense
  outgoing = s.from_begin_R, s.from_size_R, s.from_place_R
  return move(y_P, outgoing, (s.begin_R, s.size_R), axis, rows)


def _there_backward(axis, rows, body, saved, d_P):
  del rows
  segments, x_rows = saved
  return _back(d_P, segments, axis, len(x_rows), body), None


def _back_backward(axis, rows, body, saved, d_Y):
  del rows
  segments, y_rows = saved
  return _there(d_Y, segments, axis, len(y_rows), body), None


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
  begin_R, size_R, place_R = outgoing
  out = jnp.zeros((length, *x.shape[1:]), x.dtype)
  return jax.lax.ragged_all_to_all(x, out, begin_R, size_R, place_R, incoming[1], axis_name=axis)


def _dense(x, outgoing, incoming, axis, length):
  """Every pair exchanges as many rows as the smaller of both buffers has."""
  (begin_R, size_R, _), (into_R, incoming_R) = outgoing, incoming
  n = jax.lax.axis_size(axis)
  row_J = jnp.arange(min(len(x), length))
  offset = lambda size_nL: jnp.cumsum(size_nL, axis=1) - size_nL  # of a run in what a pair sends
  size_nL = size_R.reshape(n, -1)
  pick = jax.vmap(functools.partial(_place, row_J))
  sent = _rows(x, *pick(offset(size_nL), size_nL, begin_R.reshape(n, -1)))
  received = jax.lax.all_to_all(sent, axis, 0, 0)
  first_nL = len(row_J) * jnp.arange(n)[:, None] + offset(incoming_R.reshape(n, -1))
  flat = received.reshape(-1, *received.shape[2:])
  return _rows(flat, *_place(jnp.arange(length), into_R, incoming_R, first_nL.reshape(-1)))


def _place(place, begin_R, size_R, to_R):
  """Where each place lies once the runs that begin at begin_R begin at to_R; if it is in any."""
  inside_R = (place[:, None] >= begin_R) & (place[:, None] < begin_R + size_R)
  moved = place + jnp.sum(jnp.where(inside_R, to_R - begin_R, 0), axis=1)
  return moved, jnp.any(inside_R, axis=1)


def _rows(x, index, exists):
  """x[index], zero where the row does not exist."""
  taken = x[jnp.where(exists, index, 0)]
  return jnp.where(exists.reshape(exists.shape + (1,) * (x.ndim - 1)), taken, 0)
