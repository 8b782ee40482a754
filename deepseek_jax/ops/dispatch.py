"""Which body of an op runs. A named one runs or raises; None takes the best one of the backend."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

# "xla" is plain JAX arranged for memory or speed, "reference" plain JAX arranged for reading.
_PREFERENCE = {
  "gpu": ("pallas_gpu", "xla", "reference"),
  "tpu": ("pallas_tpu", "xla", "reference"),
  "cpu": ("xla", "reference"),
}


def call(implementations: Mapping[str, Callable], name: str | None, *args, **kwargs) -> Any:
  """Runs one of the implementations of an op.

  Args:
    implementations: name -> function; "reference" is always among them and takes everything.
    name: the one to run; None runs the first of the backend's preference that takes the arguments,
      and logs which one that was, once per op.
    *args, **kwargs: go to the implementation.

  Raises: ValueError for an unknown name; whatever a named implementation raises, in particular
    NotImplementedError for arguments that it cannot take.
  """
  if name is not None:
    if name not in implementations:
      raise ValueError(f"implementation is {name!r}, accepted are {sorted(implementations)}.")
    return implementations[name](*args, **kwargs)
  backend = jax.default_backend()
  for candidate in _PREFERENCE[backend]:
    if candidate not in implementations:
      continue
    try:
      result = implementations[candidate](*args, **kwargs)
    except NotImplementedError:
      continue  # a kernel states its limits this way; the reference has none
    reference = implementations["reference"]
    _log_choice(reference.__module__, reference.__name__, candidate, backend)
    return result
  raise AssertionError("every op has a reference")


@functools.cache
def _log_choice(module: str, function: str, choice: str, backend: str) -> None:
  op = f"{module.removesuffix('.reference')}.{function}"
  logging.getLogger(__name__).info("%s runs its %r implementation on %s", op, choice, backend)
