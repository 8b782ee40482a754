"""Which body of an op runs. A named one runs or raises; None takes the best one of the device."""

import functools
import importlib
import logging
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax

# "xla" is plain JAX arranged for memory or speed, "reference" plain JAX arranged for reading.
_PREFERENCE = {
  "gpu": ("pallas_gpu", "pallas_triton", "xla", "reference"),
  "tpu": ("pallas_tpu", "ragged_dot", "xla", "reference"),
  "cpu": ("xla", "reference"),
}


_HOPPER = ("H100", "H200", "GH200", "H800", "H20")  # in the device's name


class Device(NamedTuple):
  platform: str  # "cpu", "gpu" or "tpu"
  kind: str  # as JAX names it: "NVIDIA H200", "TPU v6 lite", ...
  cores: int | None  # multiprocessors of a GPU, cores of a TPU device; None where unknown


def device() -> Device:
  """What the program that is being traced will run on.

  That is the device of the mesh in use, which may be one that is only compiled for, and otherwise
  the first device of this process.
  """
  abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  if abstract is not None:
    return Device(abstract.platform, abstract.device_kind, abstract.num_cores)
  first = jax.devices()[0]
  return Device(first.platform, first.device_kind, getattr(first, "core_count", None))


def require_hopper() -> None:
  """Raises NotImplementedError on accelerators but Hopper GPUs; a CPU interprets kernels."""
  found = device()
  if found.platform != "cpu" and not any(chip in found.kind for chip in _HOPPER):
    raise NotImplementedError(f"the kernel is for Hopper GPUs, this is a {found.kind}")


def load(module: str) -> ModuleType:
  """A module of kernels, imported at first use: it takes long, and reaches into parts of JAX that
  differ between its versions.

  Raises: NotImplementedError where they do not fit this one.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise NotImplementedError(f"{module} does not fit jax {jax.__version__}: {error}") from error


def on_demand(module: str, function: str, *static: str) -> Callable:
  """A function of a module that is loaded when it is called; with `static`, what `once` makes."""

  def call(*args, **kwargs):
    found = getattr(load(module), function)
    return (once(found, *static) if static else found)(*args, **kwargs)

  return call


@functools.cache
def once(function: Callable, *static: str) -> Callable:
  """The function, traced and lowered once for all calls with equal shapes.

  Without this a program has every kernel once for each layer, each with other debugging names in
  it, so that no two are equal and all are compiled: 240 instead of a dozen in 16 layers.

  Args:
    function: of arrays, that no gradient passes through.
    static: names of the arguments that are no arrays.
  """
  return jax.jit(function, static_argnames=static)


def _splits_programs() -> bool:
  """Whether the compiler will split this program over several devices of the mesh in use."""
  mesh = jax.sharding.get_abstract_mesh()
  return any(
    size > 1 and kind != jax.sharding.AxisType.Manual
    for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
  )


def call(
  implementations: Mapping[str, Callable],
  name: str | None,
  *args,
  slow: Collection[str] = (),
  **kwargs,
) -> Any:
  """Runs one of the implementations of an op.

  Args:
    implementations: name -> function; "reference" is always among them and takes everything.
    name: the one to run; None runs the first of the device's preference that takes the arguments,
      and logs which one that was, once per op. A Pallas kernel is not taken where the compiler
      splits the program over devices, since it cannot split the kernel: use shard_map there.
    slow: names that are never taken unless asked for, since plain JAX is as fast for these shapes.
    *args, **kwargs: go to the implementation.

  Raises: ValueError for an unknown name; whatever a named implementation raises, in particular
    NotImplementedError for arguments or a device that it cannot take.
  """
  if name is not None:
    if name not in implementations:
      raise ValueError(f"implementation is {name!r}, accepted are {sorted(implementations)}.")
    return implementations[name](*args, **kwargs)
  platform = device().platform
  if _splits_programs():
    slow = (*slow, *(known for known in implementations if known.startswith("pallas_")))
  for candidate in _PREFERENCE[platform]:
    if candidate not in implementations or candidate in slow:
      continue
    try:
      result = implementations[candidate](*args, **kwargs)
    except NotImplementedError:
      continue  # a kernel states its limits this way; the reference has none
    reference = implementations["reference"]
    _log_choice(reference.__module__, reference.__name__, candidate, platform)
    return result
  raise AssertionError("every op has a reference")


@functools.cache
def _log_choice(module: str, function: str, choice: str, platform: str) -> None:
  op = f"{module.removesuffix('.reference')}.{function}"
  logging.getLogger(__name__).info("%s runs its %r implementation on %s", op, choice, platform)
