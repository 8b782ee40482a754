"""Logical axis names -> mesh axes: the one place where parallelism is decided.

Parameters name their axes where they are declared (`nn.with_logical_partitioning`), activations at
`constrain`; only this file knows which mesh axes exist.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from deepseek_jax.training_config import MeshConfig

MESH_AXES = ("replica", "fsdp", "expert", "context", "tensor")

# Logical axis -> mesh axes, major to minor; () is replicated. Along an array, left to right, a mesh
# axis is used once, and only where the dimension divides by it. Every device works on tokens of its
# own, also along `expert`; along `replica` weights are whole copies.
RULES: dict[str, tuple[str, ...]] = {
  "batch": ("replica", "fsdp", "expert"),
  "copy_rows": ("replica",),  # rows, while every device of a copy of the weights sees all of them
  "slots": ("context",),
  "embed": ("fsdp", "expert", "context"),
  "experts": ("expert",),
  "table_rows": ("fsdp", "expert", "context"),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "mlp": ("tensor",),
  # Logical matrices that Muon works on, on a device each as far as they go; experts lie so already.
  "matrices": ("expert", "context", "fsdp", "tensor"),
  "layers": (),  # the axis that a scan over equal groups adds
}

(SLOT_AXIS,) = RULES["slots"]  # one axis: windows reach over its borders to one neighbour

Names = Sequence[str | None]


def make_mesh(cfg: MeshConfig, devices: Sequence | None = None) -> Mesh:
  """The device mesh, every axis of type Auto, laid on the links of the machine.

  An axis takes whole sides of a TPU's torus where it can and parts of them where it cannot; the
  last axes, whose traffic is densest, choose first. Of several slices each holds whole replicas.

  Args:
    cfg: devices along each axis.
    devices: which ones; None takes all of them.

  Raises: ValueError with the sentence of `mesh_problem`.
  """
  devices = jax.devices() if devices is None else devices
  slices = slice_count(devices)
  if problem := mesh_problem(cfg, devices=len(devices), slices=slices):
    raise ValueError(problem)
  replica, *rest = (getattr(cfg, axis) for axis in MESH_AXES)
  inside, across = (replica // slices, *rest), (slices, *(1 for _ in rest))
  if slices > 1:
    laid = create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
  else:
    laid = create_device_mesh(inside, devices, allow_split_physical_axes=True)
  types = (AxisType.Auto,) * len(inside)  # Linen's boxed initialization fails under Explicit axes
  return Mesh(laid, MESH_AXES, axis_types=types)


def mesh_problem(cfg: MeshConfig, *, devices: int, slices: int) -> str | None:
  """Why a mesh cannot be laid on so many devices, in a sentence; None if it can."""
  sizes = {axis: getattr(cfg, axis) for axis in MESH_AXES}
  if math.prod(sizes.values()) != devices:
    axes = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
    return (
      f"The axes of mesh ({axes}) multiply to {math.prod(sizes.values())}, but the number of "
      f"devices is {devices}."
    )
  if cfg.replica % slices:
    return (
      f"mesh.replica is {cfg.replica}, which {slices} slices do not divide; only replicas may lie "
      "in several slices."
    )
  return None


def slice_count(devices: Sequence) -> int:
  """How many TPU slices there are; hosts of other devices count as one, whatever joins them."""
  return len({getattr(d, "slice_index", 0) for d in devices if d.platform == "tpu"}) or 1


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


def mesh_axes(entry: Any) -> tuple[str, ...]:
  """One place of a PartitionSpec as a tuple."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_to_split() -> AbstractMesh | None:
  """The mesh of `jax.set_mesh` where work can still be split over its devices.

  Returns: None without a mesh, with one device, and inside shard_map.
  """
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types
  return None if alone else mesh


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Pins x to the mesh of `jax.set_mesh` by logical axis names; the identity without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh))


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
  """Rows of a batch over the data axes, slots and entries over context.

  For every field of a Layout: all begin with [B,S], [B,T] or [B,S/m], and train/checks.py has seen
  to it that those divide.
  """
  return NamedSharding(mesh, PartitionSpec(RULES["batch"], RULES["slots"]))


def batch_pieces(cfg: MeshConfig) -> int:
  """How many pieces the rows of a batch are cut into; their number must divide by it."""
  return math.prod(getattr(cfg, axis) for axis in RULES["batch"])


def to_host(tree: Any) -> Any:
  """NumPy arrays of a whole tree, on every process; all of them have to ask."""

  def fetch(x: Any) -> np.ndarray:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(fetch, tree)
