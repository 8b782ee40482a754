"""TensorBoard events of a run: a local file, or a temporary one that is copied to a store."""

import concurrent.futures
import contextlib
import pathlib
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
  Event,  # pyright: ignore[reportAttributeAccessIssue]
  SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from deepseek_jax.storage_path import RemotePath, StoragePath, upload_tree

NAME = "events"  # begins the name of every file
FLUSH_SECONDS = 30.0  # between two flushes of the file, each an fsync
_HEAD = 4096  # bytes that hold the first events of a file: its version, and the start


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
    self._writer = EventsWriter(str(self._folder / NAME))
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


def read_starts(folder: StoragePath) -> list[int]:
  """The last step before each start of a run, ascending, 0 for its first one; a start hides those
  after later steps, as it hides their events. Raises OSError.
  """
  found: list[int] = []
  for _, step in sorted(start for head in _heads(folder) for start in _starts(head)):
    found = [earlier for earlier in found if earlier <= step] + [step]
  return found


def _heads(folder: StoragePath) -> Iterator[bytes]:
  """The first bytes of every file; a store gives whole ones only."""
  if isinstance(folder, RemotePath):
    yield from ((folder / name).read_bytes()[:_HEAD] for name in folder.names_below(NAME))
    return
  for path in folder.glob(f"{NAME}.*"):
    with open(path, "rb") as file:
      yield file.read(_HEAD)


def _starts(head: bytes) -> Iterator[tuple[float, int]]:
  """When a start was written, and the last step before it. A record is the length of an event
  (8 bytes), a checksum (4), the event, and another checksum (4).
  """
  place = 0
  while len(head) >= place + 12:
    (size,) = struct.unpack_from("<Q", head, place)
    begin = place + 12
    place = begin + size + 4
    try:
      event = Event.FromString(head[begin : begin + size])
    except DecodeError:
      return  # torn, or cut at the end of the head
    if event.session_log.status == SessionLog.START:
      yield event.wall_time, event.step - 1
