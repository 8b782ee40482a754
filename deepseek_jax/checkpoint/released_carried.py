"""Tensors that an export takes over from a release: our model has no vision tower and no drafter.

They go out with the bytes that they came with. Only an export in another dtype decodes them.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.released import (
  Tensors,
  decoded_rows,
  list_problems,
  tensor_problems,
)
from deepseek_jax.checkpoint.released_folder import ReleasedFolder
from deepseek_jax.checkpoint.released_formats import TILE
from deepseek_jax.checkpoint.released_names import ReleasedTensor, Stored
from deepseek_jax.checkpoint.released_parts import part_tensors
from deepseek_jax.config import ModelConfig

_BLOCK_BYTES = 2**26  # float32 values of a block
_PLAIN: dict[str, Stored] = {"BF16": "bf16", "F32": "f32"}


class Carried(NamedTuple):
  tensors: tuple[ReleasedTensor, ...] = ()  # stored as they are in their files
  files: Tensors = MappingProxyType({})  # the same and their scales
  values: Mapping[str, Any] | None = None  # the config.json that describes them

  def raw(self, tensor: ReleasedTensor) -> Iterator[tuple[str, np.ndarray]]:
    """The tensor and its scale as they are, block by block."""
    for name in (tensor.name, tensor.scale_name):
      if name in self.files:
        stored = self.files[name]
        for first, last in _blocks(stored.header.shape):
          yield name, stored.rows(first, last)

  def values_of(self, tensor: ReleasedTensor) -> Iterator[np.ndarray]:
    """float32 blocks of its rows, each at a multiple of a tile's rows."""
    for first, last in _blocks(tensor.shape):
      yield decoded_rows(self.files, tensor, first, last)


def carried_tensors(released: ReleasedFolder, cfg: ModelConfig) -> Carried:
  """All tensors of a release that are not the backbone's, for an export of another backbone.

  Raises: CheckpointError that lists what does not fit the model of `cfg`.
  """
  files = {name: at for part in released.parts.values() for name, at in part.items()}
  tensors = tuple(part_tensors(released.values, cfg))
  problems = [problem for tensor in tensors for problem in tensor_problems(files, tensor)]
  text = released.values.get("text_config", released.values)
  targets = text.get("dspark_target_layer_ids", ()) if "drafter" in released.parts else ()
  problems += [
    f"the drafter reads layer {layer} of {cfg.num_layers}"
    for layer in targets
    if layer >= cfg.num_layers
  ]
  if problems:
    raise CheckpointError(f"{released.path} does not fit the model: {list_problems(problems)}")
  found = lambda tensor: _PLAIN.get(files[tensor.name].header.dtype, tensor.stored)
  as_found = (dataclasses.replace(tensor, stored=found(tensor)) for tensor in tensors)
  return Carried(tuple(as_found), files, released.values)


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
  step = max(TILE, _BLOCK_BYTES // (4 * math.prod(shape[1:])) // TILE * TILE)
  return ((first, min(first + step, shape[0])) for first in range(0, shape[0], step))
