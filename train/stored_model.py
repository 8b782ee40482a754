"""A model out of a checkpoint, ours or released, with one subtree for each layer, in float32."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Settings
from deepseek_jax.checkpoint import CheckpointError, read_document
from deepseek_jax.checkpoint.names import named_leaves, to_nested
from deepseek_jax.checkpoint.released import COLLECTIONS, list_problems, read_part
from deepseek_jax.checkpoint.released_export import Arrays, owners_of_tensors, shape_problems
from deepseek_jax.checkpoint.released_folder import is_released, open_released
from deepseek_jax.checkpoint.released_names import Parameter, parameters
from deepseek_jax.checkpoint.stored_arrays import open_items
from deepseek_jax.config import ModelConfig
from deepseek_jax.storage_path import StoragePath, is_remote
from train.errors import UsageError
from train.import_released import check_hashes, model_shardings
from train.stages import resolve, stage_of
from train.stored_step import find_step


class StoredModel(NamedTuple):
  cfg: ModelConfig  # scan_layers=False
  read: Callable[[Parameter, Any], np.ndarray]  # part of a parameter of `cfg`, float32
  path: StoragePath  # of the step, or of the released folder
  settings: Settings | None  # of the run at this step, for a checkpoint of ours

  def variables(
    self, mesh: Mesh, dtype_of: Callable[[str], Any] = lambda path: np.float32
  ) -> dict[str, Any]:
    """{"params": ..., "balance": ...}, every array on its devices; one at a time is on the host.

    Args:
      dtype_of: path of a parameter -> what it is rounded to on its way.
    """
    shardings = model_shardings(Settings(model=self.cfg), mesh)
    places = {item: named_leaves(shardings[name]) for item, name in COLLECTIONS.items()}
    flat: dict[str, dict[str, jax.Array]] = {name: {} for name in COLLECTIONS.values()}
    for parameter in parameters(self.cfg):
      dtype = dtype_of(parameter.path)
      flat[COLLECTIONS[parameter.item]][parameter.path] = jax.make_array_from_callback(
        parameter.shape,
        places[parameter.item][parameter.path],
        lambda index, parameter=parameter, dtype=dtype: self.read(parameter, index).astype(dtype),
      )
    return {collection: to_nested(leaves) for collection, leaves in flat.items()}


def open_model(name: str, text: str, number: int | None = None) -> StoredModel:
  """Checks a checkpoint and reads its headers.

  Args:
    name: the argument that names it.
    text: its value.
    number: which step of a run folder, see `find_step`.

  Raises: UsageError for one that is damaged or not what its configuration says.
  """
  path = pathlib.Path(text)
  try:
    if not is_remote(text) and is_released(path):
      check_hashes(path)
      released = open_released(path)
      cfg = dataclasses.replace(released.cfg, scan_layers=False)
      if number is not None:
        raise UsageError([f"--step is {number}, but {name} {text} is no folder of a run."])
      return StoredModel(cfg, functools.partial(read_part, released.tensors), path, None)
    step = find_step(name, text, number=number)
    settings = settings_at(step.settings, read_document(step.path, "meta")["step"])
    arrays, cfg = open_items(step.path), settings.model
    if problems := shape_problems(arrays, cfg):
      raise CheckpointError(f"{step.path} does not fit its config.json: {list_problems(problems)}")
  except CheckpointError as error:
    raise UsageError([str(error)]) from None
  unrolled = dataclasses.replace(cfg, scan_layers=False)
  return StoredModel(unrolled, _reader(arrays, cfg), step.path, settings)


def settings_at(settings: Settings, step: int) -> Settings:
  """Those of the stage of a run that took a step: what the weights were last trained with."""
  stages = resolve(settings)
  return stage_of(stages, min(max(1, step), stages[-1].last_step)).settings


def _reader(arrays: Arrays, cfg: ModelConfig) -> Callable[[Parameter, Any], np.ndarray]:
  """Finds the layers that were stored as one array, as scan_layers has them."""
  owners = owners_of_tensors(cfg)

  def read(parameter: Parameter, index: tuple[slice, ...]) -> np.ndarray:
    owner, number = owners[parameter.tensors[0].name]
    grouped = len(owner.lead) > len(parameter.lead)
    layer = (number // math.prod(parameter.lead),) if grouped else ()
    part = arrays[owner.item][owner.path][(*layer, *index)]
    return np.asarray(part.read().result(), np.float32)

  return read
