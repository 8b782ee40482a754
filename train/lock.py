"""One run per local folder: an flock on `run.lock`, which names its owner.

The kernel gives an flock back when its process ends, however it ends, so a lock that can be taken
on the owner's own host has no living owner. Another host may not see the flock (some network file
systems keep it local), so a lock that a run on another host never released is not taken over.
"""

import dataclasses
import datetime
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable
from typing import Self, TextIO

from train.errors import UsageError

NAME = "run.lock"
OWNER_WRITES = 1.0  # seconds that a process which just took the lock has to write its name


@dataclasses.dataclass(frozen=True)
class Owner:
  pid: int
  host: str
  since: str  # UTC, ISO 8601

  @classmethod
  def me(cls) -> Self:
    now = datetime.datetime.now(datetime.UTC)
    return cls(os.getpid(), socket.gethostname(), now.isoformat(timespec="seconds"))

  def __str__(self) -> str:
    return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
  """Held from construction to `release`, or to the end of the process.

  Args:
    folder: the run folder; must exist.
    report: takes one sentence when the lock of a dead run is taken over.

  Raises: UsageError that names the owner if another run has the folder.
  """

  def __init__(self, folder: pathlib.Path, report: Callable[[str], None]) -> None:
    path = folder / NAME
    # "a+" creates the file and, unlike "w", leaves the owner's name in it.
    self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115, open for as long as it is held
    try:
      self._take(path, report)
    except BaseException:
      self._file.close()
      raise
    self._write(json.dumps(dataclasses.asdict(Owner.me())))

  def release(self) -> None:
    """Gives the folder back; does nothing the second time."""
    if not self._file.closed:
      self._write("")
      self._file.close()

  def _take(self, path: pathlib.Path, report: Callable[[str], None]) -> None:
    folder = path.parent
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      owner = _owner_soon(self._file)
      raise UsageError(
        [f"{folder} is in use by {owner}; stop it, or use another folder."]
      ) from None
    owner = _owner(self._file)
    if owner is None:
      return
    if owner.host != socket.gethostname():
      raise UsageError(
        [f"{folder} is locked by {owner}; if that run has ended, delete {path} and try again."]
      )
    report(f"Took over {folder} from {owner}, which has ended without releasing it.")

  def _write(self, text: str) -> None:
    self._file.truncate(0)
    self._file.write(text)
    self._file.flush()


def _owner(file: TextIO) -> Owner | None:
  """None for a released lock, and while its owner has not written yet."""
  file.seek(0)
  try:
    return Owner(**json.loads(file.read()))
  except (ValueError, TypeError):
    return None


def _owner_soon(file: TextIO) -> Owner | str:
  deadline = time.monotonic() + OWNER_WRITES
  while (owner := _owner(file)) is None and time.monotonic() < deadline:
    time.sleep(0.02)
  return owner or "another process"
