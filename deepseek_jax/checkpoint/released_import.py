"""A released checkpoint -> a step of ours: one parameter at a time, straight onto its devices."""

import pathlib
from typing import Any

import jax
import numpy as np

from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.names import named_leaves, to_nested
from deepseek_jax.checkpoint.released import COLLECTIONS, Tensors, read_part
from deepseek_jax.checkpoint.released_names import Parameter, parameters
from deepseek_jax.checkpoint.streamed import Unmade, write_step
from deepseek_jax.config import ModelConfig


def import_step(
  tensors: Tensors, cfg: ModelConfig, shardings: Any, step_folder: pathlib.Path, meta: dict
) -> None:
  """Writes step 0 with the items "params" and "router"; every process makes the same call.

  A process reads what its devices hold: the experts and table rows of its shards, and of a matrix
  that is cut along its inputs the whole. In memory are one parameter's shards and 64 MB of rows.

  Args:
    tensors: those of the model and no others (released_problems).
    cfg: groups of layers are as its scan_layers has them.
    shardings: {"params": ..., "balance": ...} like the model's variables.
    step_folder: must not exist.
    meta: facts that the step keeps; "step" is added.

  Raises: CheckpointError if the step cannot be written.
  """
  places = {item: named_leaves(shardings[name]) for item, name in COLLECTIONS.items()}
  flat: dict[str, dict[str, Unmade]] = {item: {} for item in COLLECTIONS}
  for parameter in parameters(cfg):
    sharding = places[parameter.item][parameter.path]
    flat[parameter.item][parameter.path] = _unmade(tensors, parameter, sharding)
  items = {item: to_nested(leaves) for item, leaves in flat.items()}
  write_step(step_folder, items, {"data": {}, "meta": {**meta, "step": 0}})


def _unmade(tensors: Tensors, parameter: Parameter, sharding: jax.sharding.Sharding) -> Unmade:
  def make() -> jax.Array:
    parts: dict[str, np.ndarray] = {}  # several devices may hold the same

    def part(index: Any) -> np.ndarray:
      if str(index) not in parts:
        parts[str(index)] = _read(tensors, parameter, index)
      return parts[str(index)]

    return jax.make_array_from_callback(parameter.shape, sharding, part)

  return Unmade(parameter.shape, np.dtype(np.float32), make, len(parameter.lead))


def _read(tensors: Tensors, parameter: Parameter, index: tuple[slice, ...]) -> np.ndarray:
  try:
    return read_part(tensors, parameter, index)
  except ValueError as error:  # a file that changed since its header was read, or a bad scale
    raise CheckpointError(str(error)) from None
  except OSError as error:
    raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from None
