"""`metrics.jsonl` and TensorBoard events of a run, and what the screen shows.

metrics.jsonl has one JSON object a line and exactly one line per step, after restarts too: a run
that resumes at step k first cuts the lines of later steps, and what a killed run left of its last
line. JSON knows no NaN and no infinity; both are written as null.
"""

import contextlib
import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
  Event,  # pyright: ignore[reportAttributeAccessIssue]
  SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from train.progress import Progress

NAME = "metrics.jsonl"
FLUSH_SECONDS = 30.0  # between two flushes of the TensorBoard file, each an fsync


class MetricsWriter:
  """Writes the metrics of each step; a context manager that closes itself.

  Args:
    workdir: the run folder.
    resume_step: steps done before this start; 0 starts the file anew.
    total_steps: steps of the whole run.
    log_every: steps between two lines on a screen that is no terminal.
    progress: shows the steps; None: made here, for standard output.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    resume_step: int,
    total_steps: int,
    log_every: int,
    progress: Progress | None = None,
  ) -> None:
    folder = pathlib.Path(workdir)
    self._last_step = resume_step
    cut_after(folder / NAME, resume_step)
    self._file = open(folder / NAME, "ab", buffering=0)  # noqa: SIM115, open for the whole run
    # Not SummaryWriter: after one write that fails its thread is dead, and once its queue is full
    # the run waits for it for ever.
    self._events = EventsWriter(str(folder / "events"))
    self._flushed = time.monotonic()
    start = SessionLog(status=SessionLog.START)  # hides the events of later steps
    self._event(Event(step=resume_step + 1, session_log=start))
    self._progress = progress or Progress(
      first_step=resume_step, total_steps=total_steps, log_every=log_every
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes one line and passes it to the operating system at once.

    Args:
      step: optimizer steps taken, one more than in the call before.
      values: name -> number, text, or nested lists and mappings of them; arrays are accepted.

    Raises: ValueError for a step that was written already.
    """
    if step <= self._last_step:
      raise ValueError(f"step {step} was written already, the last one is {self._last_step}.")
    self._last_step = step
    record = {"step": step, **{name: _plain(value) for name, value in values.items()}}
    self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
    scalars = [
      Summary.Value(tag=name, simple_value=value)
      for name, value in record.items()
      if name != "step" and isinstance(value, int | float)
    ]
    self._event(Event(step=step, summary=Summary(value=scalars)))
    self._progress.step(step, record)

  def say(self, sentence: str) -> None:
    """Shows a sentence without disturbing the progress bar."""
    self._progress.say(sentence)

  def close(self) -> None:
    self._progress.close()
    with contextlib.suppress(OSError):  # the error that ends the run must not be replaced
      self._events.close()
    self._file.close()

  def _event(self, event: Event) -> None:
    event.wall_time = time.time()
    self._events.write_event(event)
    if time.monotonic() - self._flushed > FLUSH_SECONDS:
      self._events.flush()
      self._flushed = time.monotonic()


def cut_after(path: pathlib.Path, step: int) -> None:
  """Removes, atomically, the lines of later steps and whatever is no complete line."""
  if not path.exists():
    return
  lines = path.read_bytes().splitlines(keepends=True)
  kept = [line for line in lines if (found := _step_of(line)) is not None and found <= step]
  if len(kept) == len(lines):
    return
  partial = path.with_name(f"{path.name}.tmp")
  with open(partial, "wb") as file:
    file.writelines(kept)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)


def _step_of(line: bytes) -> int | None:
  """None for a torn line."""
  if not line.endswith(b"\n"):
    return None
  try:
    return int(json.loads(line)["step"])
  except (ValueError, KeyError, TypeError):
    return None


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
