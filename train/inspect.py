"""`python -m train inspect`: what a checkpoint holds, ours or released, without loading it."""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from deepseek_jax.checkpoint import CheckpointError, manifest
from deepseek_jax.checkpoint.released_folder import is_released, open_released, read_all_headers
from deepseek_jax.checkpoint.released_index import (
  index,
  logical_parameters,
  release_tensors,
  shard_plan,
)
from deepseek_jax.checkpoint.released_parts import DrafterSizes, VisionSizes
from deepseek_jax.checkpoint.storage import size_text
from deepseek_jax.checkpoint.stored_arrays import open_items
from deepseek_jax.config import flash
from deepseek_jax.storage_path import StoragePath, is_remote
from train import settings
from train.errors import Exit, UsageError
from train.stored_step import find_step


class Entry(NamedTuple):
  dtype: str
  shape: tuple[int, ...]
  bytes: int


class Contents(NamedTuple):
  kind: str  # "checkpoint" or "released"
  folder: StoragePath
  entries: dict[str, Entry]  # "params/layer_0/attn/wq_a", or a released name
  files: dict[str, dict[str, Any]]  # "bytes", and "sha256" where it is known
  problem: str | None  # why a released checkpoint is not what its config.json says


def main(argv: Sequence[str]) -> int:
  """Prints tables. Returns 0, or 1 for a checkpoint that is not as it was written."""
  parser = argparse.ArgumentParser("python -m train inspect", description=__doc__)
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument("--checkpoint", metavar="D",
                      help="a run folder, a step of one, or a released checkpoint")  # fmt: skip
  source.add_argument("--config", metavar="FILE.py[:variant]",
                      help="what a released checkpoint of this model would hold")  # fmt: skip
  parser.add_argument("--all", action="store_true",
                      help="a line for each array, not for each kind")  # fmt: skip
  parser.add_argument("--hashes", action="store_true",
                      help="read all files and compare them with the stored SHA-256")  # fmt: skip
  parser.add_argument("--output", type=pathlib.Path, metavar="F.json",
                      help="also write every array and file")  # fmt: skip
  arguments = parser.parse_args(argv)
  if arguments.config and arguments.hashes:
    parser.error("--hashes goes with --checkpoint")
  contents = planned(arguments.config) if arguments.config else read_contents(arguments.checkpoint)
  problems = [contents.problem] if contents.problem else []
  if arguments.hashes:
    contents, differing = hashed(contents)
    problems += differing
  show(contents, every=arguments.all)
  for problem in problems:
    print(problem)
  if arguments.output:
    try:
      arguments.output.write_text(json.dumps(as_json(contents), indent=1) + "\n")
    except OSError as error:
      reason = f"--output {arguments.output} cannot be written: {error.strerror}."
      raise UsageError([reason]) from None
  return Exit.CHECK_FAILED if problems else Exit.DONE


def read_contents(text: str) -> Contents:
  """Headers and metadata of a checkpoint. Raises UsageError for a folder that holds none."""
  if not is_remote(text) and is_released(pathlib.Path(text)):
    return _released(pathlib.Path(text).absolute())
  step = find_step("--checkpoint", text, check=False)
  try:
    arrays = open_items(step.path)
    files = manifest.read_manifest(step.path)
  except (CheckpointError, ValueError, OSError) as error:
    raise UsageError([f"{step.path} cannot be read: {error}"]) from None
  entries = {
    f"{item}/{name}": Entry(
      array.dtype.name,
      tuple(array.shape),
      array.size * array.dtype.numpy_dtype.itemsize,
    )
    for item, leaves in arrays.items()
    for name, array in leaves.items()
  }
  return Contents("checkpoint", step.path, entries, dict(files), None)


def planned(config: str) -> Contents:
  """The index and the files of an export, for the release with pictures and drafter.

  Raises: UsageError for a configuration that is none.
  """
  cfg = settings.load(config, {}).model
  whole = cfg.tree() == flash().tree()  # whatever a stage switches off
  tensors = list(
    release_tensors(cfg, VisionSizes() if whole else None, DrafterSizes() if whole else None)
  )
  entries = {name: Entry(*header, header.bytes) for name, header in index(tensors).items()}
  sizes = {
    shard.file: {"bytes": sum(header.bytes for header in shard.entries.values())}
    for shard in shard_plan(tensors)
  }
  print(f"{logical_parameters(tensors):,} parameters.")
  return Contents("released", pathlib.Path(config), entries, sizes, None)


def _released(folder: pathlib.Path) -> Contents:
  try:
    tensors = read_all_headers(folder)
    files = {name: {"bytes": (folder / name).stat().st_size} for name in _files(folder)}
    if manifest.has_manifest(folder):
      files |= manifest.read_manifest(folder)
  except (ValueError, OSError) as error:
    raise UsageError([str(error)]) from None
  problem = None
  try:
    open_released(folder)
  except CheckpointError as error:
    problem = str(error)
  entries = {n: Entry(*stored.header, stored.header.bytes) for n, stored in tensors.items()}
  return Contents("released", folder, entries, files, problem)


def _files(folder: pathlib.Path) -> list[str]:
  kinds = (".safetensors", ".json")
  return sorted(p.name for p in folder.iterdir() if p.suffix in kinds and p.name != manifest.NAME)


def hashed(contents: Contents) -> tuple[Contents, list[str]]:
  """The contents with the SHA-256 of every file, and what differs from what was stored."""
  if manifest.has_manifest(contents.folder):
    problems = [f"{problem}." for problem in manifest.verify_step(contents.folder)]
    if not problems:
      print("Every file is as it was written.")
    return contents, problems
  return contents._replace(files=manifest.hash_files(contents.folder, list(contents.files))), []


def show(contents: Contents, *, every: bool) -> None:
  """Arrays, then files."""
  total = sum(entry.bytes for entry in contents.entries.values())
  print(f"{contents.folder}: {len(contents.entries):,} arrays with {size_text(total)}.")
  table = Table()
  columns = ("array", "dtype", "shape", "count", "size")
  for column in columns:
    table.add_column(column, justify="right" if column in ("count", "size") else "left")
  rows: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
  for name, entry in contents.entries.items():
    key = (name if every else kind(name), entry.dtype, entry.shape)
    rows.setdefault(key, []).append(entry.bytes)
  for (name, dtype, shape), sizes in rows.items():
    table.add_row(name, dtype, str(list(shape)), str(len(sizes)), size_text(sum(sizes)))
  Console(width=None if sys.stdout.isatty() else 120, markup=False).print(table)
  for name, facts in contents.files.items():  # as sha256sum has them
    print(f"{facts.get('sha256', '(no SHA-256)'):64}  {size_text(facts['bytes']):>9}  {name}")


def kind(name: str) -> str:
  """The name with a star for every number that stands alone or behind "layer_"."""
  return re.sub(r"(?<=layer_)\d+(?=/)|(?<=\.)\d+(?=\.)", "*", name)


def as_json(contents: Contents) -> dict[str, Any]:
  """Every array and file."""
  return {
    "kind": contents.kind,
    "folder": str(contents.folder),
    "bytes": sum(entry.bytes for entry in contents.entries.values()),
    "arrays": {name: entry._asdict() for name, entry in contents.entries.items()},
    "files": contents.files,
  }
