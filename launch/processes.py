"""The processes of one attempt of a run: started together, ended together.

Each leads a process group of its own, so that a signal of the terminal reaches only the
supervisor, and so that the data workers of a process that died can be found and ended.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Command(NamedTuple):
  argv: tuple[str, ...]
  environment: Mapping[str, str]  # all of it


class Processes:
  """Context manager; at its end nothing of the attempt is left."""

  def __init__(self, commands: Sequence[Command]) -> None:
    self._commands = commands
    self._running: dict[int, subprocess.Popen] = {}  # by the place in `commands`
    self.ended: dict[int, int] = {}  # place -> exit code as a shell has it, in the order of ending

  def __enter__(self) -> "Processes":
    try:
      for place, (argv, environment) in enumerate(self._commands):
        self._running[place] = subprocess.Popen(argv, env=environment, start_new_session=True)
    except BaseException:
      self.kill()
      raise
    return self

  def __exit__(self, *error: object) -> None:
    self.kill()

  @property
  def running(self) -> int:
    return len(self._running)

  def poll(self) -> None:
    """Moves what has ended to `ended`."""
    for place, process in list(self._running.items()):
      # Not reaped yet, so that its number still means its group and no other.
      if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        self.ended[place] = self._finish(place)

  def send(self, number: int) -> None:
    """Signals each process itself; what it started is its own business."""
    for process in self._running.values():
      process.send_signal(number)

  def kill(self) -> None:
    """Ends everything that runs, at once; this is not recorded in `ended`."""
    for process in self._running.values():
      _kill_group(process)
    for place in list(self._running):
      self._finish(place)

  def _finish(self, place: int) -> int:
    process = self._running.pop(place)
    _kill_group(process)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _kill_group(process: subprocess.Popen) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
