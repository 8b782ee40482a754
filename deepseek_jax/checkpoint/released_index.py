"""What the files of a released checkpoint hold, from the configuration alone: names, dtypes, shapes
and bytes, and how they are cut into shards."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from deepseek_jax.checkpoint.released_formats import TILE
from deepseek_jax.checkpoint.released_names import ReleasedTensor, Stored, parameters
from deepseek_jax.checkpoint.released_parts import (
  DrafterSizes,
  VisionSizes,
  drafter_tensors,
  vision_tensors,
)
from deepseek_jax.checkpoint.safetensors_file import Header
from deepseek_jax.config import ModelConfig

SHARD_BYTES = 5 * 10**9  # what public loaders and file stores are used to

_PLAIN: dict[Stored, str] = {"bf16": "BF16", "f32": "F32"}


class Shard(NamedTuple):
  file: str  # model-00001-of-00048.safetensors
  tensors: list[ReleasedTensor]
  entries: dict[str, Header]  # in the order of the file; a scale follows its weight


def stored_as(tensor: ReleasedTensor, dtype: str) -> Stored:
  """How an export of this dtype, "released" or "bfloat16", stores the tensor."""
  return tensor.stored if dtype == "released" or tensor.stored == "f32" else "bf16"


def headers(tensor: ReleasedTensor, stored: Stored) -> dict[str, Header]:
  """The entries of a file for the tensor and its scale."""
  if stored in _PLAIN:
    return {tensor.name: Header(_PLAIN[stored], tensor.shape)}
  out, inputs = tensor.shape
  tiles = -(-inputs // TILE)
  scale = Header("F8_E8M0", (-(-out // TILE) if stored == "fp8" else out, tiles))
  packed = stored == "fp4"
  weight = Header("I8", (out, inputs // 2)) if packed else Header("F8_E4M3", (out, inputs))
  return {tensor.name: weight, tensor.scale_name: scale}


def release_tensors(
  cfg: ModelConfig, vision: VisionSizes | None = None, drafter: DrafterSizes | None = None
) -> Iterator[ReleasedTensor]:
  """All tensors without their scales, those of one of our parameters next to each other."""
  for parameter in parameters(cfg):
    yield from parameter.tensors
  if vision is not None:
    yield from vision_tensors(vision, cfg)
  if drafter is not None:
    yield from drafter_tensors(drafter, cfg)


def index(tensors: Iterable[ReleasedTensor], dtype: str = "released") -> dict[str, Header]:
  """Every key of a checkpoint with its dtype and shape."""
  found: dict[str, Header] = {}
  for tensor in tensors:
    found |= headers(tensor, stored_as(tensor, dtype))
  return found


def logical_parameters(tensors: Iterable[ReleasedTensor]) -> int:
  """How many numbers the tensors stand for; scales are none."""
  return sum(math.prod(tensor.shape) for tensor in tensors)


def shard_plan(
  tensors: Iterable[ReleasedTensor], dtype: str = "released", limit: int = SHARD_BYTES
) -> list[Shard]:
  """Cuts a checkpoint into files of at most `limit` bytes; a larger tensor is a file of its own."""
  shards: list[tuple[list[ReleasedTensor], dict[str, Header]]] = []
  room = 0
  for tensor in tensors:
    entries = headers(tensor, stored_as(tensor, dtype))
    size = sum(header.bytes for header in entries.values())
    if not shards or size > room:
      shards.append(([], {}))
      room = limit
    shards[-1][0].append(tensor)
    shards[-1][1].update(entries)
    room -= size
  count = len(shards)
  return [
    Shard(f"model-{number:05}-of-{count:05}.safetensors", *shard)
    for number, shard in enumerate(shards, 1)
  ]
