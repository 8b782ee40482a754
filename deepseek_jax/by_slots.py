"""Work that every device does on the rows and slots that it holds, in shard_map.

Legend: B rows, Q slots; Place has those of one device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from deepseek_jax.sharding import SLOT_AXIS, Names, mesh_axes, mesh_to_split, partition_spec

KEPT = "kernel result"  # checkpoint_name of what a backward pass should not compute again


class Place(NamedTuple):
  """Which slots of the rows a device works on, inside `by_slots`. Legend: B rows, Q its slots."""

  pieces: int  # that the slots are cut into

  def begin(self, length: int) -> jax.Array | int:
    """Number of the first slot, where a device has `length` of them."""
    return jax.lax.axis_index(SLOT_AXIS) * length if self.pieces > 1 else 0

  def halo(self, count: int) -> int:
    """How many slots `with_halo` puts in front."""
    return count if self.pieces > 1 else 0

  def with_halo(self, x_BQ: jax.Array, count: int) -> jax.Array:
    """x with the `count` slots before its first; zeros before the first of all."""
    if not self.halo(count):
      return x_BQ
    if count > x_BQ.shape[1]:
      raise ValueError(f"{count} slots of a neighbour are needed, it has {x_BQ.shape[1]}.")
    to_next = [(n, n + 1) for n in range(self.pieces - 1)]
    before = jax.lax.ppermute(x_BQ[:, x_BQ.shape[1] - count :], SLOT_AXIS, to_next)
    return jnp.concatenate([before, x_BQ], axis=1)


def by_slots(
  fn: Callable,
  slots: Any,
  *,
  rows: Any = (),
  pieces: Any = (),
  weights: Sequence[tuple[jax.Array, Names]] = (),
  dtype: Any = None,
  returns: Literal["slots", "pieces"] = "slots",
) -> Any:
  """fn(place, slots, rows, pieces, weights), every device on the rows and slots that it holds.

  The compiler cannot split a kernel over devices, and splits a loop over tokens badly; here each
  device runs it on its own. A device along another axis repeats the work of its neighbour. Without
  a mesh, with one device, and inside shard_map it is fn itself.

  Args:
    fn: of a Place and the trees below.
    slots: tree of [B, Q, ...]: cut along rows and slots.
    rows: tree of [B, ...]: cut along rows, whole along slots; gradients are summed in float32.
    pieces: what an earlier call has returned as pieces.
    weights: parameters with their logical axes; whole inside. Their gradients are summed over
      devices in float32.
    dtype: that weights are cast to before they travel; fn itself casts those that did not.
    returns: "slots" for a tree of [B, Q, ...]; "pieces" for one whose arrays have a leading axis of
      any size, the same on every device; it is cut along that axis where it comes in again.
  """
  mesh = mesh_to_split()
  if mesh is None:
    return fn(Place(1), slots, rows, pieces, tuple(w for w, _ in weights))
  leading = partition_spec(("batch", "slots"), jax.tree.leaves(slots)[0].shape[:2], mesh)
  place = Place(mesh.shape[SLOT_AXIS] if leading[1] else 1)
  in_pieces = PartitionSpec(tuple(mesh_axes(leading[0]) + mesh_axes(leading[1])))
  of_weights = tuple(partition_spec(names, w.shape, mesh) for w, names in weights)
  dtypes = jax.tree.map(lambda x: x.dtype, rows)
  if place.pieces > 1:  # what every device of a context group reads, they all have a gradient of
    rows = jax.tree.map(_in_float32, rows)

  def local(slots, rows, pieces, weights):
    rows = jax.tree.map(lambda x, dtype: x.astype(dtype), rows, dtypes)
    weights = tuple(gathered(w, spec, dtype) for w, spec in zip(weights, of_weights, strict=True))
    return fn(place, slots, rows, pieces, weights)

  # XLA's GPU compiler (jax 0.11.2) crashes on the backward pass of a shard_map that has an operand
  # it does not use. What checkpoint saves is used: inputs, and what a kernel names KEPT.
  local = jax.checkpoint(local, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
  split = jax.shard_map(
    local,
    in_specs=(leading, PartitionSpec(leading[0]), in_pieces, of_weights),
    out_specs=leading if returns == "slots" else in_pieces,
    check_vma=False,  # kernels do not say along which axes their results vary
  )
  return split(slots, rows, pieces, tuple(w for w, _ in weights))


def _in_float32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(weight: jax.Array, spec: PartitionSpec, dtype: Any, kept: tuple[str, ...] = ()):
  """A weight as every device needs it, inside shard_map: cast, then gathered.

  Its gradient is summed over the devices in float32, each of which keeps its part.

  Args:
    weight: float32 part of a device.
    spec: how the weight lies on the mesh.
    dtype: of the result.
    kept: mesh axes along which it stays cut.
  """
  whole = weight.astype(dtype)
  for dimension, axes in _gathered_axes(spec, kept):
    whole = jax.lax.all_gather(whole, axes, axis=dimension, tiled=True)
  return whole


def _scatter(spec, dtype, kept, like, d_whole):
  del dtype
  d_weight = d_whole.astype(jnp.float32)
  for dimension, axes in _gathered_axes(spec, kept):
    d_weight = jax.lax.psum_scatter(d_weight, axes, scatter_dimension=dimension, tiled=True)
  return (d_weight.astype(like.dtype),)


gathered.defvjp(
  lambda weight, spec, dtype, kept: (gathered(weight, spec, dtype, kept), weight[:0]), _scatter
)


def _gathered_axes(spec: PartitionSpec, kept: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
  cut = ((n, tuple(a for a in mesh_axes(axes) if a not in kept)) for n, axes in enumerate(spec))
  return [(dimension, axes) for dimension, axes in cut if axes]
