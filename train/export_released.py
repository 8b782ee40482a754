"""A step of ours becomes a released checkpoint: shards, index, config.json, hashes."""

import dataclasses
import json
import pathlib
import shutil

import jax
from rich.console import Console
from rich.table import Table

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.released import list_problems
from deepseek_jax.checkpoint.released_export import (
  Rounding,
  owners_of_tensors,
  shape_problems,
  write_index,
  write_shard,
)
from deepseek_jax.checkpoint.released_index import Shard, release_tensors, shard_plan
from deepseek_jax.checkpoint.storage import size_text
from deepseek_jax.checkpoint.stored_arrays import open_items
from deepseek_jax.storage_path import StoragePath
from train import processes
from train.errors import UsageError
from train.stored_step import find_step
from train.whole_folder import whole_folder


def export_released(checkpoint: str, output: pathlib.Path, dtype: str) -> None:
  """Writes `output`, which appears when it is complete; every process writes some of the files.

  Args:
    checkpoint: a run folder or a step.
    output: must not exist.
    dtype: "released" or "bfloat16".

  Raises: UsageError for a checkpoint that cannot be used or too little room; CheckpointError if
    a file cannot be written.
  """
  with processes.agreed():
    step = find_step("--checkpoint", checkpoint)
    arrays = open_items(step.path)
    cfg = step.settings.model
    if problems := shape_problems(arrays, cfg):
      raise UsageError([f"{step.path} does not fit its config.json: {list_problems(problems)}"])
    shards = shard_plan(release_tensors(cfg), dtype)
    _announce(step.path, shards, output)
  owners, errors = owners_of_tensors(cfg), dict[str, Rounding]()
  with whole_folder(output) as folder:
    for shard in shards[jax.process_index() :: jax.process_count()]:
      for kind, error in write_shard(arrays, owners, shard, folder, dtype).items():
        errors.setdefault(kind, Rounding()).add(error)
    errors = _of_all_processes(errors)
    if processes.first():
      write_index(folder, shards, cfg, dtype)
      manifest.write_manifest(folder)
  if processes.first():
    show(errors)


def _announce(step: StoragePath, shards: list[Shard], output: pathlib.Path) -> None:
  """Says how large the export will be. Raises UsageError where there is no room for it."""
  size = sum(header.bytes for shard in shards for header in shard.entries.values())
  processes.say(f"{step} becomes {len(shards)} files with {size_text(size)} in {output}.")
  parent = next(folder for folder in output.parents if folder.is_dir())
  free = shutil.disk_usage(parent).free
  if size > free:
    raise UsageError([f"{parent} has {size_text(free)} free, and {size_text(size)} are needed."])


def _of_all_processes(errors: dict[str, Rounding]) -> dict[str, Rounding]:
  """Adds up what every process has rounded, after all of them have."""
  own = [json.dumps((kind, dataclasses.astuple(error))) for kind, error in errors.items()]
  total: dict[str, Rounding] = {}
  for words in processes.gather(own):
    for kind, values in map(json.loads, words):
      total.setdefault(kind, Rounding()).add(Rounding(*values))
  return total


def show(errors: dict[str, Rounding]) -> None:
  """What rounding has cost, by kind of tensor."""
  rounded = {kind: error for kind, error in errors.items() if error.largest}
  table = Table(title="Rounding errors, relative", title_justify="left")
  for column in ("kind of tensor", "largest", "rms"):
    table.add_column(column, justify="left" if column == "kind of tensor" else "right")
  for kind, error in sorted(rounded.items()):
    table.add_row(kind, f"{error.largest:.2e}", f"{error.rms:.2e}")
  if rounded:
    Console().print(table)
  print(f"{len(errors) - len(rounded)} of {len(errors)} kinds of tensors are stored exactly.")
