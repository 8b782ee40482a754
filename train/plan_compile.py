"""The real training step, compiled for devices that are not here. Compiled is not run."""

import math
import re
import time
from typing import Any, NamedTuple

import jax

from configs.schema import Settings
from deepseek_jax.sharding import make_mesh
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


def compile_step(settings: Settings, topology: Topology) -> Compiled:
  """Compiles the step of pretraining for a mesh that fits (see `checks.mesh_problems`)."""
  mesh = make_mesh(settings.mesh, topology.devices)
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
  temporary_bytes = _temporary_bytes(memory, topology.platform)
  used = memory.argument_size_in_bytes + temporary_bytes + memory.generated_code_size_in_bytes
  return Compiled(
    devices=mesh.size,
    argument_bytes=memory.argument_size_in_bytes,
    temporary_bytes=temporary_bytes,
    memory_bytes=topology.memory,
    fits=used + _kept_bytes(memory) <= USABLE * topology.memory,
    compile_seconds=seconds,
    collectives=collectives(executable.as_text()),
    refusal=None,
  )


def _kept_bytes(memory: Any) -> int:
  """Results that have no donated argument's place."""
  return memory.output_size_in_bytes - memory.alias_size_in_bytes


def _temporary_bytes(memory: Any, platform: str) -> int:
  """Temporaries in the memory that arguments lie in.

  libtpu's temp_size_in_bytes has more than its buffer assignment and memory report hold (81 for
  60 GB, unexplained; docs/log.md). On a GPU, total_allocation_bytes lacks the heap of collectives.
  """
  if platform != "tpu":
    return memory.temp_size_in_bytes
  return memory.total_allocation_bytes - memory.argument_size_in_bytes - _kept_bytes(memory)


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
