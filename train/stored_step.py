"""`--checkpoint D`: which step of ours it names, and the configuration of the run that wrote it."""

from collections.abc import Sequence
from typing import NamedTuple

from configs.schema import Settings
from deepseek_jax.checkpoint import manifest
from deepseek_jax.storage_path import StoragePath, storage_path
from train import processes
from train.errors import UsageError
from train.settings import settings_from_json


class StoredStep(NamedTuple):
  path: StoragePath
  settings: Settings


def find_step(name: str, text: str, *, number: int | None = None, check: bool = True) -> StoredStep:
  """A step of a run folder, or the step that is named itself.

  Args:
    name: of the argument.
    text: its value.
    number: which step of a run folder, as --step says; None: the newest complete one.
    check: compare all files with their hashes, which reads them.

  Raises: UsageError for a folder that is neither, for a damaged step, and for a number that there
    is no complete step of.
  """
  path = storage_path(text).absolute()
  try:
    if manifest.has_manifest(path):
      step = path
      if number is not None:
        raise UsageError([f"--step is {number}, but {name} {text} is a step itself."])
    elif steps := manifest.complete_steps(path / "checkpoints"):
      if number is not None and number not in steps:
        raise no_such_step(number, text, steps)
      step = path / "checkpoints" / str(steps[-1] if number is None else number)
    else:
      raise UsageError([f"{name} {text} is no run folder with a complete step, and no step."])
    if check and processes.first() and (problems := manifest.verify_step(step)):
      raise UsageError([f"{step} cannot be used: {'; '.join(problems[:3])}."])
    config = step.parent.parent / "config.json"
    text = config.read_text(encoding="utf-8")
  except OSError as error:
    reason = error.strerror or str(error)
    raise UsageError([f"{error.filename or path} cannot be read: {reason}."]) from None
  try:
    return StoredStep(step, settings_from_json(text))
  except (ValueError, TypeError) as error:
    raise UsageError([f"{config} is no configuration of a run: {error}."]) from None


def no_such_step(number: int, text: str, steps: Sequence[int]) -> UsageError:
  """Why --step names none of the complete steps of the run folder `text`."""
  have = ", ".join(map(str, steps))
  return UsageError([f"--step is {number}, the complete checkpoints of {text} are {have}."])
