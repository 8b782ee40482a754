"""A folder that appears under its name when it is complete, or not at all."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from deepseek_jax.checkpoint import CheckpointError
from train import processes
from train.errors import UsageError

PARTIAL = ".partial"  # ends the name of a folder that is not finished


@contextlib.contextmanager
def whole_folder(output: pathlib.Path) -> Iterator[pathlib.Path]:
  """Inside, every process may write into the folder that this gives; the first one makes it.

  At the end it is renamed to `output`; after an error it is removed. What a killed process left
  under its name is removed at the start.

  Raises: UsageError where it cannot be made; CheckpointError for an OSError inside.
  """
  partial = output.with_name(output.name + PARTIAL)
  with processes.agreed():
    if processes.first():
      _make_empty(partial)
  try:
    yield partial
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("written")
    if processes.first():
      partial.rename(output)
  except OSError as error:
    _remove(partial)
    reason = error.strerror or str(error)
    raise CheckpointError(f"{output} could not be written: {reason}.") from error
  except BaseException:
    _remove(partial)
    raise


def _make_empty(folder: pathlib.Path) -> None:
  try:
    if folder.exists():
      shutil.rmtree(folder)
    folder.mkdir(parents=True)
  except OSError as error:
    raise UsageError([f"{folder} cannot be written: {error.strerror}."]) from None


def _remove(folder: pathlib.Path) -> None:
  if processes.first():
    shutil.rmtree(folder, ignore_errors=True)
