"""A released checkpoint on disk: config.json, safetensors files and their index; only headers are
read."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.released import list_problems, released_problems, tensor_problems
from deepseek_jax.checkpoint.released_config import read_config, released_config
from deepseek_jax.checkpoint.released_parts import (
  PARTS,
  DrafterSizes,
  VisionSizes,
  part_tensors,
)
from deepseek_jax.checkpoint.safetensors_file import StoredTensor, read_headers, unique_keys
from deepseek_jax.config import EngramConfig, ModelConfig
from deepseek_jax.ngram import NgramHash

INDEX = "model.safetensors.index.json"


class ReleasedFolder(NamedTuple):
  path: pathlib.Path
  values: dict[str, Any]  # config.json
  cfg: ModelConfig
  tensors: dict[str, StoredTensor]  # those of the backbone and the Engram tables
  parts: dict[str, dict[str, StoredTensor]]  # those that we do not hold: "vision", "drafter"


def is_released(path: pathlib.Path) -> bool:
  """Whether a folder looks like a released checkpoint."""
  return (path / "config.json").is_file() and any(path.glob("*.safetensors*"))


def open_released(path: pathlib.Path) -> ReleasedFolder:
  """Reads configuration, index and headers, and checks that all fit each other.

  Raises: CheckpointError that lists every tensor which is missing, unknown, or not what the
    configuration says.
  """
  try:
    values = read_config(path)
    cfg = released_config(values)
    if problems := cfg.problems():
      raise ValueError(f"{path / 'config.json'}: {' '.join(problems)}")
    tensors = read_all_headers(path)
    problems = list(_problems(tensors, values, cfg))
    if cfg.engram.layers and not problems:
      _check_primes(cfg.engram)
  except ValueError as error:
    raise CheckpointError(str(error)) from None
  except OSError as error:
    raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror}.") from None
  except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
    # A configuration is input, and whatever it holds is the user's to mend.
    raise CheckpointError(f"{path / 'config.json'}: {type(error).__name__}: {error}.") from None
  if problems:
    raise CheckpointError(f"{path} does not fit its config.json: {list_problems(problems)}")
  own, parts = _split(tensors)
  return ReleasedFolder(path, values, cfg, own, parts)


def _check_primes(engram: EngramConfig) -> None:
  """Raises ValueError for tables whose rows are no sums of primes."""
  fewest = engram.lookups * engram.prime_start
  if min(engram.table_rows) < fewest:  # before a search that may have no end
    raise ValueError(
      f"engram.table_rows is {engram.table_rows}, but {engram.lookups} primes from "
      f"{engram.prime_start} on add up to {fewest} or more."
    )
  NgramHash(engram, np.zeros(0, np.int32))


def _split(
  tensors: dict[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, dict[str, StoredTensor]]]:
  """Those of the backbone, and those of each other part that there is."""
  own, parts = dict(tensors), {}
  for part, names in PARTS.items():
    if found := {name: own.pop(name) for name in tensors if name.startswith(names)}:
      parts[part] = found
  return own, parts


def read_all_headers(path: pathlib.Path) -> dict[str, StoredTensor]:
  """Every tensor of a folder's files. Raises ValueError where index and files differ."""
  files = sorted(path.glob("*.safetensors"))
  index = path / INDEX
  if index.is_file():
    wanted = _weight_map(index)
    absent = sorted(set(wanted.values()) - {file.name for file in files})
    if absent:
      raise ValueError(f"{path} lacks {', '.join(absent)}, which {INDEX} names.")
    files = [file for file in files if file.name in set(wanted.values())]
  if not files:
    raise ValueError(f"{path} holds no safetensors file.")
  tensors: dict[str, StoredTensor] = {}
  problems: list[str] = []
  for file in files:
    for name, stored in read_headers(file).items():
      if name in tensors:
        problems.append(f"tensor {name} is in {tensors[name].path.name} and in {file.name}")
      tensors[name] = stored
  if index.is_file():
    problems += _index_problems(wanted, tensors)
  if problems:
    raise ValueError(f"{path}: {list_problems(problems)}")
  return tensors


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  try:
    values = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    return {str(name): str(file) for name, file in values["weight_map"].items()}
  except (KeyError, TypeError, AttributeError):
    raise ValueError(f"{index} is no index: it has no weight_map.") from None
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{index} is no index: {error}.") from None


def _index_problems(wanted: dict[str, str], tensors: dict[str, StoredTensor]) -> Iterator[str]:
  for name, file in wanted.items():
    if name not in tensors:
      yield f"the index has tensor {name}, no file has it"
    elif tensors[name].path.name != file:
      yield f"the index has tensor {name} in {file}, it is in {tensors[name].path.name}"
  yield from (f"{tensors[n].path.name} has tensor {n}, the index has not"
              for n in tensors if n not in wanted)  # fmt: skip


def _problems(
  tensors: dict[str, StoredTensor], values: dict[str, Any], cfg: ModelConfig
) -> Iterator[str]:
  """Of all parts; those that we do not hold are checked by name and shape."""
  own, _ = _split(tensors)
  drafter, vision = DrafterSizes.from_config(values), VisionSizes.from_config(values)
  counts = {
    "n_routed_experts": cfg.moe.experts,
    "num_nextn_predict_layers": drafter.stages if drafter else 0,
    "dspark_n_routed_experts": drafter.experts if drafter else 0,
    "vision_config.num_hidden_layers": vision.layers if vision else 0,
  }
  if impossible := [f"{key} is {n}" for key, n in counts.items() if n > len(tensors)]:
    yield f"{', '.join(impossible)}, of {len(tensors)} tensors"  # too many to be named one by one
    return
  yield from released_problems(own, cfg)
  unused = set(tensors) - set(own)
  for tensor in part_tensors(values, cfg):
    yield from tensor_problems(tensors, tensor)
    unused -= {tensor.name, tensor.scale_name}
  yield from (f"unused tensor {name}" for name in sorted(unused))
