"""The real training step, compiled for devices that are not here. Compiled is not run."""

import itertools
import math
import re
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from configs.schema import Settings
from deepseek_jax.sharding import MESH_AXES, make_mesh
from deepseek_jax.training_config import MeshConfig
from train.errors import UsageError
from train.plan_collectives import collectives
from train.plan_topology import Topology
from train.programs import Programs, build_programs

USABLE = 0.9  # of a device's memory; the rest is for the runtime and fragmentation


class Compiled(NamedTuple):
  """Sizes are bytes on one device."""

  devices: int
  argument_bytes: int  # state and batch
  temporary_bytes: int | None  # None where the compiler gives up before it knows
  memory_bytes: int  # what a program may use
  fits: bool
  compile_seconds: float
  collectives: dict[str, dict[str, int]]  # empty for a program that was not finished
  refusal: str | None  # what the compiler said instead of finishing


def lay_mesh(settings: Settings, topology: Topology) -> Mesh:
  """The mesh of the configuration on the devices of the topology.

  Raises: UsageError that names a mesh which fits, where there is one.
  """
  try:
    return _mesh(settings.mesh, topology)
  except ValueError as error:
    hint = _fitting(settings, topology)
    raise UsageError([f"{error} {hint}"]) from error


def compile_step(settings: Settings, topology: Topology) -> Compiled:
  """Compiles the step of pretraining. Raises: UsageError as `lay_mesh` does."""
  mesh = lay_mesh(settings, topology)
  # Code that asks for its device or mesh while it is traced is told the target, not this machine;
  # jax.set_mesh would also place arrays, on devices that are not there.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    programs = build_programs(settings, mesh)
    traced = programs.step.trace(programs.abstract_state, programs.abstract_batch)
    lowered = traced.lower(lowering_platforms=(topology.platform,))
    began = time.monotonic()
    try:
      executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      return _refused(programs, topology, time.monotonic() - began, error)
    seconds = time.monotonic() - began
  memory = executable.memory_analysis()
  kept = memory.output_size_in_bytes - memory.alias_size_in_bytes  # not in a donated place
  used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept
  return Compiled(
    devices=mesh.size,
    argument_bytes=memory.argument_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    memory_bytes=topology.memory,
    fits=used <= USABLE * topology.memory,
    compile_seconds=seconds,
    collectives=collectives(executable.as_text()),
    refusal=None,
  )


def _refused(programs: Programs, topology: Topology, seconds: float, error: Exception) -> Compiled:
  """The report of a program for which there is no room. Raises any other error again."""
  if "RESOURCE_EXHAUSTED" not in str(error):
    raise error
  refusal = str(error).strip().splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
  shapes = (programs.abstract_state, programs.abstract_batch)
  return Compiled(
    devices=len(topology.devices),
    argument_bytes=sum(map(_device_bytes, jax.tree.leaves(shapes))),
    temporary_bytes=_temporaries(refusal),
    memory_bytes=topology.memory,
    fits=False,
    compile_seconds=seconds,
    collectives={},
    refusal=refusal,
  )


def _temporaries(refusal: str) -> int | None:
  """Bytes in "the total memory required for HLO temporaries (670.55G) exceeds ..."."""
  found = re.search(r"temporaries \(([\d.]+)([KMGT])\)", refusal)
  return int(float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)) if found else None


def _device_bytes(shape: Any) -> int:
  piece = shape.sharding.shard_shape(shape.shape)
  return math.prod(piece) * shape.dtype.itemsize


def _mesh(cfg: MeshConfig, topology: Topology) -> Mesh:
  """Raises: ValueError, a sentence, where the mesh cannot be laid on the topology."""
  sizes = {axis: getattr(cfg, axis) for axis in MESH_AXES}
  axes, product = " * ".join(f"{a} {n}" for a, n in sizes.items()), math.prod(sizes.values())
  devices = len(topology.devices)
  if product != devices:
    raise ValueError(
      f"The axes of mesh ({axes}) multiply to {product}, but {topology.name} has {devices} devices."
    )
  try:
    return make_mesh(cfg, topology.devices)
  except (NotImplementedError, AssertionError) as error:  # JAX knows no such assignment
    raise ValueError(
      f"The axes of mesh ({axes}) cannot be laid on the links of {topology.name}: the size of each "
      "must be a product of sides of a slice."
    ) from error


def _fitting(settings: Settings, topology: Topology) -> str:
  """A sentence with axes that fit and divide what they split, the largest fsdp first."""
  devices, experts = len(topology.devices), settings.model.moe.experts
  rows = settings.data.batch_rows // settings.accumulation
  divisors = [size for size in range(devices, 0, -1) if devices % size == 0]
  for fsdp, expert in itertools.product(divisors, divisors):
    context = devices // (fsdp * expert)
    if fsdp * expert * context != devices or rows % fsdp or experts % expert:
      continue
    mesh = MeshConfig(fsdp=fsdp, expert=expert, context=context)
    if settings.data.slots % context == 0 and _can_be_laid(mesh, topology):
      words = [
        f"--config.mesh.{axis}={getattr(mesh, axis)}"
        for axis in MESH_AXES
        if getattr(mesh, axis) != getattr(settings.mesh, axis)
      ]
      return f"{' '.join(words)} would fit."
  return (
    f"No mesh of {devices} devices that divides data.batch_rows / accumulation ({rows}), "
    f"model.moe.experts ({experts}) and data.slots ({settings.data.slots}) was found."
  )


def _can_be_laid(mesh: MeshConfig, topology: Topology) -> bool:
  try:
    _mesh(mesh, topology)
  except ValueError:
    return False
  return True
