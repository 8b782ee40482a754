"""Checkpoints of a run as they appear."""

import pathlib
import time
from collections.abc import Callable, Iterator

from deepseek_jax.storage_path import is_remote, storage_path
from train.errors import UsageError
from train.evaluation.checkpoints import Checkpoint, complete_checkpoints
from train.evaluation.request import LATEST
from train.processes import say
from train.stored_step import find_step

SECONDS = 5.0  # between two looks


def appearing(
  text: str, step: str | int, stopped: Callable[[], bool], *, seconds: float = SECONDS
) -> Iterator[Checkpoint]:
  """The checkpoints of a run up to its last step, each as soon as it is complete.

  Args:
    text: value of --checkpoint.
    step: LATEST begins with the newest one that is there, ALL with the first.
    stopped: asked between two of them, and while there is none.
    seconds: between two looks.

  Raises: UsageError where there is no folder, and for one whose configuration cannot be read.
  """
  run = storage_path(text).absolute()
  if not is_remote(text) and not pathlib.Path(text).is_dir():
    raise UsageError([f"--watch needs the folder of a run, but --checkpoint {text} is none."])
  seen, told = -1, False
  while not stopped():
    new = [c for c in complete_checkpoints(run) if c.step is not None and c.step > seen]
    for checkpoint in new[-1:] if seen < 0 and step == LATEST else new:
      if stopped():
        return
      yield checkpoint
      seen, told = checkpoint.step or 0, False
    if new and seen >= find_step("--checkpoint", text, check=False).settings.total_steps:
      return
    if not told:
      say(f"Waiting for a checkpoint of {text} after step {max(seen, 0):,}.")
      told = True
    _wait(seconds, stopped)


def _wait(seconds: float, stopped: Callable[[], bool]) -> None:
  """Ends early where it is to stop."""
  end = time.monotonic() + seconds
  while not stopped() and (left := end - time.monotonic()) > 0:
    time.sleep(min(0.2, left))
