"""A step of ours becomes a released checkpoint: shards, index, config.json, hashes."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping

import jax
from rich.console import Console
from rich.table import Table

from deepseek_jax.checkpoint import CheckpointError, manifest
from deepseek_jax.checkpoint.released import list_problems
from deepseek_jax.checkpoint.released_carried import Carried, carried_tensors
from deepseek_jax.checkpoint.released_export import (
  Rounding,
  owners_of_tensors,
  shape_problems,
  write_index,
  write_shard,
)
from deepseek_jax.checkpoint.released_folder import open_released
from deepseek_jax.checkpoint.released_index import Shard, release_tensors, shard_plan
from deepseek_jax.checkpoint.storage import size_text
from deepseek_jax.checkpoint.stored_arrays import open_items
from deepseek_jax.storage_path import StoragePath
from train import processes
from train.errors import UsageError
from train.import_released import check_hashes
from train.origin import parts_behind
from train.stored_step import StoredStep, find_step
from train.whole_folder import whole_folder

NOTHING = "none"  # as --carry-from


def export_released(checkpoint: str, output: pathlib.Path, dtype: str, carry_from: str) -> None:
  """Writes `output`, which appears when it is complete; every process writes some of the files.

  Args:
    checkpoint: a run folder or a step.
    output: must not exist.
    dtype: "released" or "bfloat16".
    carry_from: a released checkpoint whose vision and drafter tensors go out too, "none", or "".

  Raises: UsageError for a checkpoint that cannot be used or too little room; CheckpointError if
    a file cannot be written.
  """
  with processes.agreed():
    step = find_step("--checkpoint", checkpoint)
    arrays = open_items(step.path)
    cfg = step.settings.model
    if problems := shape_problems(arrays, cfg):
      raise UsageError([f"{step.path} does not fit its config.json: {list_problems(problems)}"])
    carried = _carried(step, carry_from)
    shards = shard_plan([*release_tensors(cfg), *carried.tensors], dtype)
    _announce(step.path, shards, output)
  owners, errors = owners_of_tensors(cfg), dict[str, Rounding]()
  with whole_folder(output) as folder:
    for shard in shards[jax.process_index() :: jax.process_count()]:
      for kind, error in write_shard(arrays, owners, shard, folder, dtype, carried).items():
        errors.setdefault(kind, Rounding()).add(error)
    errors = _of_all_processes(errors)
    if processes.first():
      write_index(folder, shards, cfg, dtype, carried)
      manifest.write_manifest(folder)
  if processes.first():
    show(errors)


def _carried(step: StoredStep, carry_from: str) -> Carried:
  """What goes out besides the backbone. Raises UsageError where something would be lost unasked."""
  known = parts_behind(step.path.parent.parent)
  if carry_from in ("", NOTHING):
    if known and not carry_from:
      raise UsageError(
        [
          f"{step.path} began with a release whose {_counts(known)} it does not hold; name that "
          f"release with --carry-from, or leave them out with --carry-from {NOTHING}."
        ]
      )
    processes.say("The export has no tensors of vision and drafter.")
    return Carried()
  path = pathlib.Path(carry_from).absolute()
  try:
    check_hashes(path)
    released = open_released(path)
    found = {part: len(tensors) for part, tensors in released.parts.items()}
    if not found or not found.items() >= known.items():
      wanted = _counts(known) or "tensors of vision or drafter"
      raise UsageError([f"--carry-from {path} has {_counts(found) or 'none'} and not {wanted}."])
    carried = carried_tensors(released, step.settings.model)
  except CheckpointError as error:
    raise UsageError([str(error)]) from None
  processes.say(f"The {_counts(found)} are those of {path}.")
  return carried


def _counts(parts: Mapping[str, int]) -> str:
  return " and ".join(f"{count:,} tensors of {part}" for part, count in parts.items())


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
