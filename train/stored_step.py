"""`--checkpoint D`: which step of ours it names, and the configuration of the run that wrote it."""

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


def find_step(name: str, text: str, *, check: bool = True) -> StoredStep:
  """A run folder's newest complete step, or the step that is named itself.

  Args:
    name: of the argument.
    text: its value.
    check: compare all files with their hashes, which reads them.

  Raises: UsageError for a folder that is neither, and for a damaged step.
  """
  path = storage_path(text).absolute()
  try:
    if manifest.has_manifest(path):
      step = path
    elif steps := manifest.complete_steps(path / "checkpoints"):
      step = path / "checkpoints" / str(steps[-1])
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
