"""Logical axis names -> mesh axes: the one place where parallelism is decided.

Parameters name their axes where they are declared (`nn.with_logical_partitioning`), activations at
`constrain`; only this file knows which mesh axes exist.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from deepseek_jax.training_config import MeshConfig

MESH_AXES = ("replica", "fsdp", "expert", "context", "tensor")

# Logical axis -> mesh axes, major to minor; () is replicated. Along an array, left to right, a mesh
# axis is used once, and only where the dimension divides by it. Every device works on tokens of its
# own, also along `expert`; along `replica` weights are whole copies.
RULES: dict[str, tuple[str, ...]] = {
  "batch": ("replica", "fsdp", "expert"),
  "slots": ("context",),
  "embed": ("fsdp", "expert", "context"),
  "experts": ("expert",),
  "table_rows": ("fsdp", "expert", "context"),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "mlp": ("tensor",),
  "layers": (),  # the axis that a scan over equal groups adds
}

KEPT = "kernel result"  # checkpoint_name of what a backward pass should not compute again

Names = Sequence[str | None]


def make_mesh(cfg: MeshConfig, devices: Sequence | None = None) -> Mesh:
  """The device mesh, every axis of type Auto.

  Args:
    cfg: devices along each axis.
    devices: which ones; None takes all of them.

  Raises: ValueError if the product of the axes is not the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  shape = tuple(getattr(cfg, axis) for axis in MESH_AXES)
  if math.prod(shape) != len(devices):
    axes = " * ".join(f"{axis} {size}" for axis, size in zip(MESH_AXES, shape, strict=True))
    raise ValueError(
      f"The axes of mesh ({axes}) multiply to {math.prod(shape)}, but the number of devices is "
      f"{len(devices)}."
    )
  types = (AxisType.Auto,) * len(shape)  # Linen's boxed initialization fails under Explicit axes
  return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices)


def partition_spec(names: Names, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
  """How an array of this shape lies on the mesh.

  Raises: ValueError for a name that is not in RULES or a name count other than the rank.
  """
  if len(names) != len(shape):
    raise ValueError(f"{len(names)} axis names {tuple(names)} for an array of shape {shape}.")
  used: set[str] = set()
  spec = []
  for name, size in zip(names, shape, strict=True):
    if name is not None and name not in RULES:
      raise ValueError(f"Logical axis {name!r} has no rule; known are {sorted(RULES)}.")
    chosen: tuple[str, ...] = ()
    for axis in RULES[name] if name else ():
      pieces = math.prod(mesh.shape[a] for a in (*chosen, axis))
      if mesh.shape[axis] > 1 and axis not in used and size % pieces == 0:
        chosen += (axis,)
    used.update(chosen)
    spec.append(chosen[0] if len(chosen) == 1 else chosen or None)
  return PartitionSpec(*spec)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Pins x to the mesh of `jax.set_mesh` by logical axis names; the identity without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh))


def by_rows(fn: Callable, count: int, rows: Any, shared: Any = ()) -> Any:
  """fn(rows, shared) where every device works on the rows of the batch that it holds.

  The compiler cannot split a kernel over devices; here each calls it on its own rows, and nothing
  travels but the gradients of what is shared. A device along another axis repeats the work of its
  neighbour. Without a mesh, with one device, and inside shard_map it is fn itself.

  Args:
    fn: of the two trees; the leading axis of every array it returns grows with the rows.
    count: rows of the batch.
    rows: tree of arrays whose leading axis is the rows, or grows with them.
    shared: tree of arrays that all devices see whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
    return fn(rows, shared)
  spec = PartitionSpec(*partition_spec(("batch",), (count,), mesh))
  # XLA's GPU compiler (jax 0.11.2) crashes on the backward pass of a shard_map that has an operand
  # it does not use. What checkpoint saves is used: inputs, and what a kernel names KEPT.
  fn = jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
  # Kernels do not say along which axes their results vary.
  split = jax.shard_map(fn, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
  return split(rows, shared)


def state_shardings(abstract_state: Any, mesh: Mesh) -> Any:
  """One NamedSharding per array of a state.

  Args:
    abstract_state: ShapeDtypeStructs, in Linen's boxes where axes were declared; an array without
      a box is replicated.

  Returns: the same tree as `nn.unbox(abstract_state)`.
  """
  is_box = lambda leaf: isinstance(leaf, nn.Partitioned)

  def place(leaf):
    if not is_box(leaf):
      return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, partition_spec(leaf.names, leaf.value.shape, mesh))

  return jax.tree.map(place, abstract_state, is_leaf=is_box)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows of a batch over the data axes; fits every field of a Layout, whatever its rank."""
  return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def batch_pieces(cfg: MeshConfig) -> int:
  """How many pieces the rows of a batch are cut into; their number must divide by it."""
  return math.prod(getattr(cfg, axis) for axis in RULES["batch"])
