"""Arguments of a verb as values: numbers with bounds, and a mesh. Problems are sentences."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from deepseek_jax.sharding import MESH_AXES, make_mesh
from deepseek_jax.training_config import MeshConfig
from train import keys
from train.errors import UsageError

# Name -> default, what is accepted in words, and whether a number is. A float default takes floats.
Numbers = Mapping[str, tuple[Any, str, Callable[[Any], bool]]]


def read_numbers(values: Mapping[str, str], known: Numbers) -> tuple[dict[str, Any], list[str]]:
  """Every known number, given or by default, and what is wrong with those that were given."""
  found, problems = {name: default for name, (default, _, _) in known.items()}, []
  for name, (default, accepted, accepts) in known.items():
    if name not in values:
      continue
    kind = float if isinstance(default, float) else int
    try:
      found[name] = keys.convert(kind, keys.from_text(kind, values[name]))
    except TypeError as error:
      problems.append(f"{name} {error}.")
      continue
    if not accepts(found[name]):
      problems.append(f"{name} must be {accepted}, got {found[name]}.")
  return found, problems


def read_mesh(text: str | None) -> tuple[MeshConfig, list[str]]:
  """What --mesh says, and what is wrong with it."""
  pairs = [pair.partition("=") for pair in text.split(",")] if text else []
  sizes = {axis: int(size) if size.isdecimal() else 0 for axis, _, size in pairs}
  if set(sizes) <= set(MESH_AXES) and all(sizes.values()):
    return MeshConfig(**sizes), []
  axes = ", ".join(MESH_AXES)
  return MeshConfig(), [f"--mesh is {text}, accepted are AXIS=DEVICES,... with the axes {axes}."]


def lay_mesh(cfg: MeshConfig) -> Mesh:
  """The mesh on the first devices, for several processes on all. Raises UsageError where there
  are not so many.
  """
  wanted, devices = math.prod(dataclasses.asdict(cfg).values()), jax.devices()
  if (count := jax.process_count()) > 1 and wanted != len(devices):
    raise UsageError(
      [f"--mesh has {wanted} devices; {count} processes need one of all {len(devices)}."]
    )
  if wanted > len(devices):
    raise UsageError([f"--mesh needs {wanted} devices, there are {len(devices)}."])
  return make_mesh(cfg, devices[:wanted])
