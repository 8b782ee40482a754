"""A step of ours -> released safetensors files, block by block."""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping

import numpy as np
import tensorstore as ts

from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.released_carried import Carried
from deepseek_jax.checkpoint.released_config import config_values
from deepseek_jax.checkpoint.released_folder import INDEX
from deepseek_jax.checkpoint.released_formats import TILE, decode, encode
from deepseek_jax.checkpoint.released_index import Shard, stored_as
from deepseek_jax.checkpoint.released_names import Parameter, ReleasedTensor, Stored, parameters
from deepseek_jax.checkpoint.safetensors_file import write_safetensors
from deepseek_jax.checkpoint.stored_arrays import chunk_shape, with_cache
from deepseek_jax.config import ModelConfig
from deepseek_jax.storage_path import write_atomically

_BLOCK_BYTES = 2**27  # float32 values that are encoded at a time

Arrays = Mapping[str, Mapping[str, ts.TensorStore]]  # by item and leaf name, as open_items gives
Owners = Mapping[str, tuple[Parameter, int]]  # by name of a released tensor


@dataclasses.dataclass
class Rounding:
  """What rounding has cost the tensors of a kind."""

  largest: float = 0.0  # error over the largest magnitude of its tensor
  squares: float = 0.0
  of_errors: float = 0.0

  @property
  def rms(self) -> float:
    """Root mean square of the errors over that of the values."""
    return math.sqrt(self.of_errors / self.squares) if self.squares else 0.0

  def add(self, other: "Rounding") -> None:
    self.largest = max(self.largest, other.largest)
    self.squares += other.squares
    self.of_errors += other.of_errors


def kind(name: str) -> str:
  """A tensor's name without the numbers of its layer and expert."""
  return re.sub(r"^layers\.\d+\.|(?<=experts)\.\d+|(?<=mtp|cks)\.\d+", "", name)


def shape_problems(arrays: Arrays, cfg: ModelConfig) -> list[str]:
  """Why the arrays are not those of the model, by name."""
  wanted = {(p.item, p.path): p.shape for p in parameters(cfg)}
  found = {
    (item, name): tuple(array.shape)
    for item in ("params", "router")
    for name, array in arrays.get(item, {}).items()
  }
  return [
    *(f"missing array {'/'.join(key)}" for key in wanted if key not in found),
    *(f"unknown array {'/'.join(key)}" for key in found if key not in wanted),
    *(
      f"array {'/'.join(key)} is {list(found[key])} instead of {list(shape)}"
      for key, shape in wanted.items()
      if key in found and found[key] != shape
    ),
  ]


def write_shard(
  arrays: Arrays,
  owners: Owners,
  shard: Shard,
  folder: pathlib.Path,
  dtype: str,
  carried: Carried = Carried(),
) -> dict[str, Rounding]:
  """Writes one file. Returns the errors of what it rounds, by kind of tensor.

  Raises: CheckpointError for values that are not finite; OSError.
  """
  roundings: dict[str, Rounding] = {}

  def pieces() -> Iterator[tuple[str, np.ndarray]]:
    opened: tuple[Parameter, ts.TensorStore] | None = None
    for tensor in shard.tensors:
      rounding, stored = (
        roundings.setdefault(kind(tensor.name), Rounding()),
        stored_as(tensor, dtype),
      )
      if tensor.name in carried.files:
        if stored == tensor.stored:
          yield from carried.raw(tensor)
        else:
          yield from _encoded(carried.values_of(tensor), tensor, stored, rounding)
        continue
      parameter, number = owners[tensor.name]
      if opened is None or opened[0] is not parameter:
        array = arrays[parameter.item][parameter.path]
        opened = parameter, with_cache(array, _shared_bytes(array, parameter))
      blocks = _blocks(opened[1], parameter, tensor, number)
      yield from _encoded(blocks, tensor, stored, rounding)

  try:
    write_safetensors(folder / shard.file, shard.entries, pieces())
  except ValueError as error:  # a carried file that changed since its header was read
    raise CheckpointError(str(error)) from None
  return roundings


def _shared_bytes(array: ts.TensorStore, parameter: Parameter) -> int:
  """Size of the chunks that a block touches; its neighbours touch some of the same."""
  tensor, lead = parameter.tensors[0], len(parameter.lead)
  chunk = chunk_shape(array)
  sizes = list(chunk[:lead]) + list(array.shape[lead:])
  rows = lead + tensor.axes.index(0)  # the axis along which a tensor is cut into blocks
  sizes[rows] = min(sizes[rows], _step(tensor) + 2 * chunk[rows])
  return 4 * math.prod(sizes)


def owners_of_tensors(cfg: ModelConfig) -> Owners:
  """Which of our parameters a released tensor is a part of, and its place there."""
  return {
    tensor.name: (parameter, number)
    for parameter in parameters(cfg)
    for number, tensor in enumerate(parameter.tensors)
  }


def write_index(
  folder: pathlib.Path,
  shards: list[Shard],
  cfg: ModelConfig,
  dtype: str,
  carried: Carried = Carried(),
) -> None:
  """The files beside the shards: their index, and config.json."""
  size = sum(header.bytes for shard in shards for header in shard.entries.values())
  weight_map = {name: shard.file for shard in shards for name in shard.entries}
  index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
  config = config_values(cfg, dtype, carried.values)
  for name, content in ((INDEX, index), ("config.json", config)):
    write_atomically(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def _encoded(
  blocks: Iterator[np.ndarray], tensor: ReleasedTensor, stored: Stored, rounding: Rounding
) -> Iterator[tuple[str, np.ndarray]]:
  own, top = Rounding(), 0.0
  for values in blocks:
    weight, scale = encode(values, stored)
    yield tensor.name, weight
    if scale is not None:
      yield tensor.scale_name, scale
    if stored != "f32":
      difference = (decode(weight, scale) - values).ravel()
      flat = values.ravel()
      largest = float(np.abs(difference).max())
      own.add(Rounding(largest, float(flat @ flat), float(difference @ difference)))
      top = max(top, float(np.abs(flat).max()))
  own.largest = own.largest / top if top else 0.0
  rounding.add(own)


def _blocks(
  array: ts.TensorStore, parameter: Parameter, tensor: ReleasedTensor, number: int
) -> Iterator[np.ndarray]:
  """The released tensor's rows in order, float32, each block at a multiple of a tile's rows."""
  place = np.unravel_index(number, parameter.lead) if parameter.lead else ()
  step = _step(tensor)
  to_view = [tensor.axes.index(axis) for axis in range(len(tensor.view))]
  for begin in range(0, tensor.view[0], step):
    ranges = [slice(begin, min(begin + step, tensor.view[0])), *map(slice, tensor.view[1:])]
    index = (*map(int, place), *(ranges[axis] for axis in tensor.axes))
    values = np.asarray(array[index].read().result(), np.float32).transpose(to_view)
    if not np.isfinite(values).all():
      raise CheckpointError(f"{parameter.path} holds values that are not finite.")
    yield values.reshape(-1, *tensor.shape[1:])


def _step(tensor: ReleasedTensor) -> int:
  """Places of the view's first axis in a block."""
  factor = math.prod(tensor.view[1 : tensor.row_axes])  # released rows for each of them
  unit = TILE // math.gcd(TILE, factor)
  return max(unit, _BLOCK_BYTES // (4 * math.prod(tensor.view[1:])) // unit * unit)
