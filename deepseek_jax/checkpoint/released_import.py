"""A released checkpoint -> a step of ours: part by part, each where its shard belongs."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.names import named_leaves, to_nested
from deepseek_jax.checkpoint.released import COLLECTIONS, Tensors, mean_row, read_part
from deepseek_jax.checkpoint.released_names import Parameter, parameters
from deepseek_jax.checkpoint.streamed import Index, Unmade, write_step
from deepseek_jax.config import ModelConfig

_OF_TOKENS = ("embed", "head")  # have a row for every token


def import_step(
  tensors: Tensors,
  cfg: ModelConfig,
  shardings: Any,
  step_folder: pathlib.Path,
  meta: dict,
  *,
  vocab: int | None = None,
) -> None:
  """Writes step 0 with the items "params" and "router"; every process makes the same call.

  A process reads what its devices will hold: the experts and table rows of its shards, and of a
  matrix that is cut along its inputs the whole. In memory are a shard of one matrix, or 64 MB of a
  table's rows, and 64 MB that are being decoded.

  Args:
    tensors: those of the model and no others (released_problems).
    cfg: of the tensors; groups of layers are as its scan_layers has them.
    shardings: {"params": ..., "balance": ...} like the model's variables.
    step_folder: must not exist.
    meta: facts that the step keeps; "step" is added.
    vocab: how many rows embedding and head get, if not as many as they have. New rows are the mean
      of the old ones.

  Raises: CheckpointError if the step cannot be written.
  """
  places = {item: named_leaves(shardings[name]) for item, name in COLLECTIONS.items()}
  flat: dict[str, dict[str, Unmade]] = {item: {} for item in COLLECTIONS}
  for parameter in parameters(cfg):
    sharding, mean = places[parameter.item][parameter.path], None
    if vocab is not None and parameter.path in _OF_TOKENS:
      parameter = dataclasses.replace(parameter, rows=vocab)
      mean = functools.cache(functools.partial(mean_row, tensors, parameter))
    flat[parameter.item][parameter.path] = Unmade(
      parameter.shape,
      np.dtype(np.float32),
      sharding,
      functools.partial(_read, tensors, parameter, mean),
      lead=len(parameter.lead),
      by_rows=parameter.tensors[0].turn == "same",
    )
  items = {item: to_nested(leaves) for item, leaves in flat.items()}
  write_step(step_folder, items, {"data": {}, "meta": {**meta, "step": 0}})


def _read(tensors: Tensors, parameter: Parameter, mean: Any, index: Index) -> np.ndarray:
  """A part; with `mean`, rows behind the tensor's last are what that gives."""
  try:
    part = read_part(tensors, parameter, index)
    if mean is not None:
      known = parameter.tensors[0].view[0] - index[0].start
      if known < len(part):
        part[max(known, 0) :] = mean()[index[1]]
    return part
  except ValueError as error:  # a file that changed since its header was read, or a bad scale
    raise CheckpointError(str(error)) from None
  except OSError as error:
    raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from None
