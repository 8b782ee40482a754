"""A model out of a checkpoint, ours or released, with one subtree for each layer, in float32."""

import dataclasses
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

from configs.schema import Settings
from deepseek_jax.checkpoint import CheckpointError
from deepseek_jax.checkpoint.released import COLLECTIONS, list_problems, load_released
from deepseek_jax.checkpoint.released_export import Arrays, owners_of_tensors, shape_problems
from deepseek_jax.checkpoint.released_folder import is_released, open_released
from deepseek_jax.checkpoint.released_names import parameters
from deepseek_jax.checkpoint.stored_arrays import open_items
from deepseek_jax.config import ModelConfig
from deepseek_jax.storage_path import is_remote
from train.errors import UsageError
from train.import_released import check_hashes
from train.stored_step import find_step


class StoredModel(NamedTuple):
  cfg: ModelConfig  # scan_layers=False
  variables: dict[str, Any]  # {"params", "balance"} of NumPy arrays
  settings: Settings | None  # of the run, for a checkpoint of ours


def load_model(name: str, text: str) -> StoredModel:
  """Reads all of a checkpoint into host memory.

  Raises: UsageError for one that is damaged or not what its configuration says; `name` is the
    argument that names it.
  """
  path = pathlib.Path(text)
  try:
    if not is_remote(text) and is_released(path):
      check_hashes(path)
      released = open_released(path)
      cfg = dataclasses.replace(released.cfg, scan_layers=False)
      return StoredModel(cfg, load_released(released.tensors, cfg), None)
    step = find_step(name, text)
    arrays = open_items(step.path)
    if problems := shape_problems(arrays, step.settings.model):
      raise CheckpointError(f"{step.path} does not fit its config.json: {list_problems(problems)}")
    cfg = dataclasses.replace(step.settings.model, scan_layers=False)
    return StoredModel(cfg, unrolled(arrays, step.settings.model), step.settings)
  except (CheckpointError, ValueError) as error:
    raise UsageError([str(error)]) from None


def unrolled(arrays: Arrays, cfg: ModelConfig) -> dict[str, Any]:
  """The stored arrays with one subtree for each layer, however they were grouped."""
  owners = owners_of_tensors(cfg)
  tree: dict[str, Any] = {collection: {} for collection in COLLECTIONS.values()}
  for parameter in parameters(dataclasses.replace(cfg, scan_layers=False)):
    owner, number = owners[parameter.tensors[0].name]
    grouped = len(owner.lead) > len(parameter.lead)
    index = (number // math.prod(parameter.lead),) if grouped else ()
    *folders, name = parameter.path.split("/")
    node = tree[COLLECTIONS[parameter.item]]
    for folder in folders:
      node = node.setdefault(folder, {})
    node[name] = np.asarray(arrays[owner.item][owner.path][index].read().result(), np.float32)
  return tree
