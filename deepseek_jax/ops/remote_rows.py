"""Rows that lie on other devices: asked for by number, read where they lie, and sent back.

Devices along some mesh axes own a piece of an array each; every device has numbers of its own. It
sorts them, sends each to the owner and gets the row in return. The backward pass sends the rows'
gradients the same way, and the owner adds them up in float32. Both go in as many rounds as the
longest queue at an owner takes (ops/exchange.py), so that memory does not depend on the numbers.
A number that repeats travels as often as it occurs: buffers must hold the case without repeats
anyway, and gradients that were added up before they travel would be rounded once more.

Legend: n devices along the axes, N rows that each owns, Y numbers of a device, C rows of a buffer,
F channels of a row.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from deepseek_jax.ops import exchange
from deepseek_jax.ops.add_rows import add_rows
from deepseek_jax.sharding import mesh_axes

# Rows of a buffer in multiples of the mean. Numbers that are spread evenly vary far less than this;
# others take more rounds.
_BUFFER_MEANS = 2


class Ownership(NamedTuple):
  """How rows and numbers lie on the mesh in use; nothing of it is traced."""

  axes: tuple[str, ...]  # mesh axes along which the owners lie, major to minor
  rows: PartitionSpec  # of the leading axes of the arrays
  shape: tuple[int, ...]  # of these axes on one device; N is their product
  numbers: PartitionSpec  # of the numbers


def remote_rows(xs: Any, number: jax.Array, ownership: Ownership, dtype: Any = None) -> Any:
  """Row `number` of every array.

  Row i of the owner with index o along the axes has number o * N + i, where the leading axes of
  its piece count as one. -1 reads zeros and has no gradient.

  Args:
    xs: tree of arrays whose leading axes lie as `ownership` says.
    number: int32, of any shape.
    ownership: where rows and numbers are.
    dtype: in which rows travel and come out, and so do their gradients; None is that of the array.

  Returns: the tree with [*number.shape, ...] in place of the leading axes. Gradients are sums in
    float32, in a fixed order, in the arrays' dtype.
  """
  leaves, tree = jax.tree.flatten(xs)
  kept = tuple((x.dtype, dtype or x.dtype) for x in leaves)
  return tree.unflatten(_take(ownership, kept, tuple(leaves), number))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _take(own: Ownership, kept, xs, number):
  read = functools.partial(_read, own, kept)
  return _split(read, (own.rows, own.numbers), own.numbers)(xs, number)


def _take_backward(own: Ownership, kept, number, d_taken):
  add = functools.partial(_add_up, own, kept)
  d_xs = _split(add, (own.numbers, own.numbers), own.rows)(number, d_taken)
  return d_xs, None


_take.defvjp(lambda own, kept, xs, number: (_take(own, kept, xs, number), number), _take_backward)


def _split(fn, in_specs, out_specs):
  # Forward and backward pass are a shard_map each and use all their operands: XLA's GPU compiler
  # (jax 0.11.2) crashes on the gradient of one that has an operand which it does not use.
  return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _read(own: Ownership, kept, xs, number):
  """On one device: the rows of its numbers."""
  trip = _plan(own, number)
  here_NF = [_flat(x, len(own.shape)) for x in xs]
  rows = len(trip.number_Y)
  nothing_YF = [
    jnp.zeros((rows, x_NF.shape[1]), travels)
    for x_NF, (_, travels) in zip(here_NF, kept, strict=True)
  ]

  def one_round(taken, segments):
    asked_C = exchange.there(trip.number_Y, segments, own.axes, trip.capacity)
    place_C = _place(own, asked_C)
    arrived_Y = _in_this_round(own, trip.number_Y, segments)[:, None]
    out = []
    for x_NF, before_YF in zip(here_NF, taken, strict=True):
      rows_CF = x_NF[place_C].astype(before_YF.dtype)
      rows_YF = exchange.back(rows_CF, segments, own.axes, rows)
      out.append(jnp.where(arrived_Y, rows_YF, before_YF).astype(before_YF.dtype))
    return out

  taken = _in_rounds(own, trip, one_round, nothing_YF)
  back_Y = jnp.zeros(rows, jnp.int32).at[trip.order_Y].set(jnp.arange(rows, dtype=jnp.int32))
  shape = lambda x: (*number.shape, *x.shape[len(own.shape) :])
  return tuple(x_YF[back_Y].reshape(shape(x)) for x_YF, x in zip(taken, xs, strict=True))


def _add_up(own: Ownership, kept, number, d_taken):
  """On one device: the gradient of the rows it owns."""
  cut = _axes_of(own.numbers)
  copies = tuple(axis for axis in own.axes if axis not in cut)
  if copies:  # along these all devices have the same numbers; one of them sends
    number = jnp.where(jax.lax.axis_index(copies) == 0, number, -1)
  trip = _plan(own, number)
  sorted_YF = [_flat(d, number.ndim)[trip.order_Y] for d in d_taken]
  zero_NF = [jnp.zeros((math.prod(own.shape), d.shape[1]), jnp.float32) for d in sorted_YF]

  def one_round(total, segments):
    asked_C = exchange.there(trip.number_Y, segments, own.axes, trip.capacity)
    filled_C = jnp.arange(trip.capacity) < jnp.sum(segments.from_size_R)
    place_C = jnp.where(filled_C, _place(own, asked_C), -1)
    come = [exchange.there(d, segments, own.axes, trip.capacity) for d in sorted_YF]
    return [add_rows(d_NF, place_C, d_CF) for d_NF, d_CF in zip(total, come, strict=True)]

  total = _in_rounds(own, trip, one_round, zero_NF)
  # Whole copies of the rows lie along the other axes that the numbers are cut along.
  others = tuple(axis for axis in cut if axis not in (*own.axes, *_axes_of(own.rows)))
  total = jax.lax.psum(total, others) if others else total
  return tuple(
    d_NF.astype(dtype).reshape(*own.shape, *d.shape[number.ndim :])
    for d_NF, d, (dtype, _) in zip(total, d_taken, kept, strict=True)
  )


class _Trip(NamedTuple):
  number_Y: jax.Array  # ascending, so that owners are in order; n * N for those without a row
  order_Y: jax.Array  # int32, where each of them was
  sizes_nn1: jax.Array  # int32 numbers of each device for each owner

  @property
  def capacity(self) -> int:
    return _BUFFER_MEANS * len(self.number_Y)


def _plan(own: Ownership, number: jax.Array) -> _Trip:
  devices, rows = jax.lax.axis_size(own.axes), math.prod(own.shape)
  flat_Y = jnp.where(number < 0, devices * rows, number).reshape(-1)
  place_Y = jnp.arange(flat_Y.size, dtype=jnp.int32)
  number_Y, order_Y = jax.lax.sort((flat_Y, place_Y), num_keys=1, is_stable=True)
  first = jnp.searchsorted(number_Y, jnp.arange(devices + 1, dtype=jnp.int32) * rows)
  sizes_n = jnp.diff(first).astype(jnp.int32)
  return _Trip(number_Y, order_Y, jax.lax.all_gather(sizes_n[:, None], own.axes))


def _in_rounds(own: Ownership, trip: _Trip, one_round, start):
  """one_round(value, segments) until nobody has anything to send; equally often everywhere."""
  me = jax.lax.axis_index(own.axes)
  everywhere = jax.sharding.get_abstract_mesh().axis_names
  count = jax.lax.pmax(exchange.rounds(trip.sizes_nn1, trip.capacity), everywhere)

  def step(state):
    number, value = state
    segments = exchange.segments(trip.sizes_nn1, me, number, trip.capacity)
    return number + 1, one_round(value, segments)

  return jax.lax.while_loop(lambda state: state[0] < count, step, (jnp.int32(0), start))[1]


def _place(own: Ownership, asked_C):
  """Numbers that came in as rows of this device; empty places of the buffer as any of them."""
  rows = math.prod(own.shape)
  return jnp.clip(asked_C - jax.lax.axis_index(own.axes) * rows, 0, rows - 1)


def _in_this_round(own: Ownership, number_Y, segments: exchange.Segments):
  owner_Y = jnp.minimum(number_Y // math.prod(own.shape), len(segments.begin_R) - 1)
  since_Y = jnp.arange(len(number_Y)) - segments.begin_R[owner_Y]
  return (since_Y >= 0) & (since_Y < segments.size_R[owner_Y])


def _flat(x, leading: int):
  """The leading axes as one, and so the others."""
  return x.reshape(math.prod(x.shape[:leading]), math.prod(x.shape[leading:]))


def _axes_of(spec: PartitionSpec) -> tuple[str, ...]:
  return tuple(axis for entry in spec for axis in mesh_axes(entry))
