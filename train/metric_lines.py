"""Where the lines of metrics.jsonl are: in one local file, or in numbered segments of a store.

An object cannot be appended to, so a remote run writes metrics-000001.jsonl, metrics-000002.jsonl,
..., each once: after SEGMENT_LINES lines, after SEGMENT_SECONDS, before each checkpoint and at the
end. `read` gives either as one list.
"""

import concurrent.futures
import json
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

from deepseek_jax.storage_path import REQUESTS, RemotePath, StoragePath, write_atomically

NAME = "metrics.jsonl"
SEGMENT = re.compile(r"metrics-(\d+)\.jsonl")
SEGMENT_LINES = 1000
SEGMENT_SECONDS = 60.0


class LineFile:
  """The local file; a line reaches the operating system at once.

  Args:
    folder: of the run.
    last_step: later lines are removed.
  """

  def __init__(self, folder: pathlib.Path, last_step: int) -> None:
    cut_after(folder / NAME, last_step)
    self._file = open(folder / NAME, "ab", buffering=0)  # noqa: SIM115, open for the whole run

  def write(self, line: bytes) -> None:
    self._file.write(line)

  def flush(self) -> None:
    """Does nothing: no line is held back."""

  def close(self) -> None:
    self._file.close()


class LineSegments:
  """The segments of a remote run, written in the background; arguments as of LineFile.

  A segment that cannot be written is tried again with the lines that follow; only `flush` and
  `close` raise.
  """

  def __init__(self, folder: RemotePath, last_step: int) -> None:
    self._folder = folder
    self._number = 1 + _cut_segments(folder, last_step)
    self._lines: list[bytes] = []  # not on their way yet
    self._sent: list[bytes] = []  # in the segment on its way
    self._began = time.monotonic()
    self._worker = concurrent.futures.ThreadPoolExecutor(1, "metrics")
    self._writing: concurrent.futures.Future[None] | None = None

  def write(self, line: bytes) -> None:
    self._lines.append(line)
    full = len(self._lines) >= SEGMENT_LINES
    late = time.monotonic() - self._began > SEGMENT_SECONDS
    idle = self._writing is None or self._writing.done()
    if idle and (full or late):
      self._settle()
      self._send()

  def flush(self) -> None:
    """Returns when every line is in the store. Raises OSError."""
    self._settle()
    self._send()
    if error := self._settle():
      raise error

  def close(self) -> None:
    try:
      self.flush()
    finally:
      self._worker.shutdown()

  def _send(self) -> None:
    self._began = time.monotonic()
    if not self._lines:
      return
    self._sent, self._lines = self._lines, []
    path = self._folder / _name(self._number)
    self._writing = self._worker.submit(path.write_bytes, b"".join(self._sent))

  def _settle(self) -> BaseException | None:
    """Waits for the segment on its way; its lines come back if it failed."""
    if self._writing is None:
      return None
    error, self._writing = self._writing.exception(), None
    if error:
      self._lines = self._sent + self._lines
    else:
      self._number += 1
    return error


def open_lines(folder: StoragePath, last_step: int) -> LineFile | LineSegments:
  """Where a run continues after a step; arguments as of LineFile."""
  if isinstance(folder, RemotePath):
    return LineSegments(folder, last_step)
  return LineFile(folder, last_step)


def read(folder: StoragePath) -> list[dict[str, Any]]:
  """The metrics of all steps, in order. Raises OSError, and ValueError for a damaged line."""
  return [json.loads(line) for line in stored_lines(folder)]


def stored_lines(folder: StoragePath) -> Iterator[bytes]:
  """The lines of all steps, in order, damaged ones too; a local folder may hold a copy of a store's
  segments. Raises OSError.
  """
  if isinstance(folder, RemotePath):
    yield from b"".join(_read_segments(folder).values()).splitlines()
    return
  copies = [path for path in sorted(folder.iterdir()) if SEGMENT.fullmatch(path.name)]
  for path in copies if copies and not (folder / NAME).exists() else [folder / NAME]:
    with open(path, "rb") as file:
      yield from file


def cut_after(path: pathlib.Path, step: int) -> None:
  """Removes, atomically, the lines of later steps and whatever is no complete line."""
  if not path.exists():
    return
  text = path.read_bytes()
  kept = _kept(text, step)
  if kept != text:
    write_atomically(path, kept)


def _cut_segments(folder: RemotePath, step: int) -> int:
  """As cut_after, the first segments first. Returns the number of the last one that is left."""
  last = 0
  for number, text in _read_segments(folder).items():
    kept = _kept(text, step)
    if not kept:
      (folder / _name(number)).unlink()
      continue
    if kept != text:
      (folder / _name(number)).write_bytes(kept)
    last = number
  return last


def _read_segments(folder: RemotePath) -> dict[int, bytes]:
  names = [SEGMENT.fullmatch(name) for name in folder.names_below("metrics-")]
  numbers = sorted(int(name[1]) for name in names if name)
  with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
    texts = pool.map(lambda number: (folder / _name(number)).read_bytes(), numbers)
    return dict(zip(numbers, texts, strict=True))


def _name(number: int) -> str:
  return f"metrics-{number:06d}.jsonl"


def _kept(text: bytes, step: int) -> bytes:
  """The complete lines of the steps up to this one."""
  lines = text.splitlines(keepends=True)
  return b"".join(line for line in lines if (of := _step_of(line)) is not None and of <= step)


def _step_of(line: bytes) -> int | None:
  """None for a torn line."""
  if not line.endswith(b"\n"):
    return None
  try:
    return int(json.loads(line)["step"])
  except (ValueError, KeyError, TypeError):
    return None
