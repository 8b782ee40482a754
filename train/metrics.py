"""Metrics of a run: lines of JSON, TensorBoard events, and what the screen shows.

There is one JSON object a line and exactly one line per step, after restarts too: a run that
resumes at step k first cuts the lines of later steps, and what a killed run left of its last line.
A line of step 0 holds what was measured before training, where something was.
JSON knows no NaN and no infinity; both are written as null.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from deepseek_jax.storage_path import StoragePath, storage_path
from train.events import Events
from train.metric_lines import open_lines
from train.progress import Progress


class MetricsWriter:
  """Writes the metrics of each step; a context manager that closes itself.

  Args:
    workdir: the run folder, local or remote.
    resume_step: steps done before this start; 0 starts the file anew.
    total_steps: steps of the whole run.
    log_every: steps between two lines on a screen that is no terminal.
    progress: shows the steps; None: made here, for standard output.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str] | StoragePath,
    *,
    resume_step: int,
    total_steps: int,
    log_every: int,
    progress: Progress | None = None,
  ) -> None:
    folder = storage_path(workdir)
    self._last_step = resume_step or -1  # a start from the beginning measures step 0 again
    self._lines = open_lines(folder, self._last_step)
    self._events = Events(folder, resume_step)
    self._progress = progress or Progress(
      first_step=resume_step, total_steps=total_steps, log_every=log_every
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line; a local file has it at once, a remote one after `flush` at the latest.

    Args:
      step: optimizer steps taken, one more than in the call before.
      values: name -> number, text, or nested lists and mappings of them; arrays are accepted.

    Raises: ValueError for a step that was written already.
    """
    if step <= self._last_step:
      raise ValueError(f"step {step} was written already, the last one is {self._last_step}.")
    self._last_step = step
    record = {"step": step, **{name: _plain(value) for name, value in values.items()}}
    self._lines.write(json.dumps(record, allow_nan=False).encode() + b"\n")
    numbers = {n: v for n, v in record.items() if n != "step" and isinstance(v, int | float)}
    self._events.scalars(step, numbers)
    self._progress.step(step, record)

  def say(self, sentence: str) -> None:
    """Shows a sentence without disturbing the progress bar."""
    self._progress.say(sentence)

  def flush(self) -> None:
    """Returns when every line is safe; call it before a checkpoint. Raises OSError."""
    self._lines.flush()
    self._events.checkpoint()

  def close(self) -> None:
    self._progress.close()
    self._events.close()
    with contextlib.suppress(OSError):  # the error that ends the run must not be replaced
      self._lines.close()


def _plain(value: Any) -> Any:
  """The value in the types that JSON has."""
  if isinstance(value, Mapping):
    return {str(name): _plain(item) for name, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if value is None or isinstance(value, str | bool | int):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  return _plain(np.asarray(value).tolist())
