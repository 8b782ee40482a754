"""Which checkpoints `--checkpoint` and `--step` name, and what identifies each of them."""

import hashlib
import json
import pathlib
from typing import NamedTuple

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.released_folder import is_released
from deepseek_jax.storage_path import StoragePath, is_remote, storage_path
from train.errors import UsageError
from train.evaluation.request import ALL, LATEST
from train.stored_step import no_such_step


class Checkpoint(NamedTuple):
  path: StoragePath  # of a step, or of a released checkpoint
  step: int | None  # None: a released checkpoint

  @property
  def name(self) -> str:
    return f"{self.path.parent.parent.name}, step {self.step:,}" if self.is_step else self.path.name

  @property
  def is_step(self) -> bool:
    return self.step is not None

  def is_there(self) -> bool:
    return manifest.has_manifest(self.path)

  def sha256(self) -> str:
    """Of manifest.json, which has the hash of every file; of a release without one, of theirs."""
    if manifest.has_manifest(self.path):
      return hashlib.sha256((self.path / manifest.NAME).read_bytes()).hexdigest()
    files = manifest.hash_files(self.path, manifest.listed_files(self.path))
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def find_checkpoints(text: str, step: str | int) -> list[Checkpoint]:
  """The checkpoints in the order of their steps.

  Args:
    text: value of --checkpoint.
    step: LATEST, ALL, or a number of a run's step.

  Raises: UsageError for a folder that holds none of them.
  """
  path = storage_path(text).absolute()
  try:
    if not is_remote(text) and is_released(pathlib.Path(text)):
      found = Checkpoint(path, None)
    elif manifest.has_manifest(path) and path.name.isdecimal():
      found = Checkpoint(path, int(path.name))
    else:
      return _of_run(text, complete_checkpoints(path), step)
  except OSError as error:
    raise UsageError([f"--checkpoint {text} cannot be read: {error.strerror}."]) from None
  if isinstance(step, int):
    raise UsageError([f"--step is {step}, but --checkpoint {text} is one checkpoint and no run."])
  return [found]


def complete_checkpoints(run: StoragePath) -> list[Checkpoint]:
  """Those of a run folder, in the order of their steps."""
  folder = run / "checkpoints"
  return [Checkpoint(folder / str(step), step) for step in manifest.complete_steps(folder)]


def _of_run(text: str, complete: list[Checkpoint], step: str | int) -> list[Checkpoint]:
  if not complete:
    problem = f"--checkpoint {text} is no run folder with a complete step, no step, and no release."
    raise UsageError([problem])
  if isinstance(step, str):
    return {LATEST: complete[-1:], ALL: complete}[step]
  found = [checkpoint for checkpoint in complete if checkpoint.step == step]
  if not found:
    raise no_such_step(step, text, [int(checkpoint.path.name) for checkpoint in complete])
  return found
