"""TensorBoard events of a run: a local file, or a temporary one that is copied to a store."""

import concurrent.futures
import contextlib
import pathlib
import tempfile
import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
  Event,  # pyright: ignore[reportAttributeAccessIssue]
  SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from deepseek_jax.storage_path import RemotePath, StoragePath, upload_tree

FLUSH_SECONDS = 30.0  # between two flushes of the file, each an fsync


class Events:
  """Writes events.*; of a remote run the whole file, at checkpoints and at the end.

  Args:
    folder: of the run.
    resume_step: events of later steps are hidden.
  """

  def __init__(self, folder: StoragePath, resume_step: int) -> None:
    self._target = folder if isinstance(folder, RemotePath) else None
    self._temporary = tempfile.TemporaryDirectory() if self._target else None
    self._folder = pathlib.Path(self._temporary.name if self._temporary else str(folder))
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "events")
    # Not SummaryWriter: after one write that fails its thread is dead, and once its queue is full
    # the run waits for it for ever.
    self._writer = EventsWriter(str(self._folder / "events"))
    self._flushed = time.monotonic()
    start = SessionLog(status=SessionLog.START)
    self._write(Event(step=resume_step + 1, session_log=start))

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Adds the values of a step."""
    summary = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    self._write(Event(step=step, summary=Summary(value=summary)))

  def checkpoint(self) -> None:
    """Begins to copy what there is; the next copy makes good for one that fails."""
    if self._target is not None:
      self._writer.flush()
      self._worker.submit(upload_tree, self._folder, self._target)

  def close(self) -> None:
    with contextlib.suppress(OSError):  # the error that ends the run must not be replaced
      self._writer.close()
    if self._target is not None:
      self._worker.submit(upload_tree, self._folder, self._target)
    self._worker.shutdown()
    if self._temporary:
      self._temporary.cleanup()

  def _write(self, event: Event) -> None:
    event.wall_time = time.time()
    self._writer.write_event(event)
    if time.monotonic() - self._flushed > FLUSH_SECONDS:
      self._writer.flush()
      self._flushed = time.monotonic()
