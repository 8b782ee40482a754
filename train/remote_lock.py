"""One run per folder in an object store: an object created if absent, renewed while its run lives.

Another host's processes cannot be asked whether they live, and clocks differ. So whoever finds the
lock held watches it by its own clock: a renewal within `stale` seconds means a living owner, none
means that it may be replaced, which again only one of several can do. Only an owner that was a
process of this very machine and is gone is not waited for.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable

from deepseek_jax.storage_path import RemotePath
from train.errors import Exit, UsageError
from train.lock import NAME, Owner

HEARTBEAT = 10.0  # seconds between two renewals
STALE = 60.0  # seconds without one after which the owner counts as dead
LOOK = 1.0  # seconds between two looks at a lock that another run holds


class RemoteLock:
  """Held from construction to `release`; a thread renews it.

  Args:
    folder: the run folder.
    report: takes one sentence about a lock that is waited for, taken over, or lost.
    heartbeat: seconds between two renewals.
    stale: seconds without a renewal after which a lock is taken over.
    lost: called in the thread when another run has taken the lock; ends the process.

  Raises: UsageError that names the owner if another run has the folder; OSError if the store cannot
  be used.
  """

  def __init__(
    self,
    folder: RemotePath,
    report: Callable[[str], None],
    *,
    heartbeat: float = HEARTBEAT,
    stale: float = STALE,
    lost: Callable[[], None] = lambda: os._exit(Exit.USAGE),
  ) -> None:
    self._folder, self._path, self._report = folder, folder / NAME, report
    self._heartbeat, self._stale, self._lost = heartbeat, stale, lost
    self._owner, self._token, self._renewals = Owner.me(), uuid.uuid4().hex, 0
    self._generation = self._take()
    self._released = threading.Event()
    self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Gives the folder back; does nothing the second time."""
    if self._released.is_set():
      return
    self._released.set()
    self._thread.join()
    with contextlib.suppress(OSError):  # the next run then waits until the lock is stale
      self._path.unlink_if_unchanged(self._generation)

  def _take(self) -> bytes:
    """The generation of our lock."""
    while True:
      data, generation = self._path.read_versioned()
      if data is not None:
        self._watch(data, generation)
      if taken := self._write(generation):
        if data is not None:
          self._report(f"Took over {self._folder} from {_owner(data)}, which no longer renews it.")
        return taken

  def _watch(self, data: bytes, generation: bytes) -> None:
    """Returns when the lock is stale or gone. Raises UsageError once its owner has renewed it."""
    if _is_gone(data):
      return
    self._report(
      f"{self._folder} is locked by {_owner(data)}; waiting up to {self._stale:.0f} s for a sign "
      "of life."
    )
    deadline = time.monotonic() + self._stale
    while time.monotonic() < deadline:
      time.sleep(min(LOOK, self._heartbeat))
      found = self._path.read_versioned()
      if found.data is None:
        return
      if found.generation != generation:
        owner = _owner(found.data)
        raise UsageError([f"{self._folder} is in use by {owner}; stop it, or use another folder."])

  def _write(self, generation: bytes) -> bytes | None:
    """Our lock in place of that generation; None if another run was faster."""
    self._renewals += 1
    values = dataclasses.asdict(self._owner) | {"machine": _machine()}
    text = json.dumps(values | {"token": self._token, "renewals": self._renewals}).encode()
    if written := self._path.write_if_unchanged(text, generation):
      return written
    # A request that was sent again because its answer was lost finds its own lock.
    data, now = self._path.read_versioned()
    return now if data == text else None

  def _renew(self) -> None:
    while not self._released.wait(self._heartbeat):
      try:
        renewed = self._write(self._generation)
      except OSError:  # the store is away, for other runs as well: the next renewal tells
        continue
      if renewed is None:
        self._report(f"Another run has taken over {self._folder}; this one ends.")
        self._lost()
        return
      self._generation = renewed


def _owner(data: bytes) -> Owner | str:
  try:
    values = json.loads(data)
    return Owner(values["pid"], values["host"], values["since"])
  except (ValueError, TypeError, KeyError):
    return "another process"


def _machine() -> str | None:
  """What two processes share only if each can see whether the other lives; None if unknown."""
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
  except OSError:  # not Linux
    return None


def _is_gone(data: bytes) -> bool:
  """Whether the owner was a process here and is none any more."""
  try:
    values = json.loads(data)
    pid, machine = int(values["pid"]), values["machine"]
  except (ValueError, TypeError, KeyError):
    return False
  return machine is not None and machine == _machine() and not pathlib.Path(f"/proc/{pid}").exists()
