"""Runs a program that nobody has read, in a process with limits.

Time, memory, open files, the size of files and, except for root, further processes are limited; the
environment and the working folder are empty, and only the standard library can be imported. That
stops mistakes, not attacks: the program may still read files and use the network, so run it where
neither matters, as in a container.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

SECONDS = 10.0  # as long as a program may run
MEGABYTES = 512  # of address space, the interpreter's included
PASSED = "passed"

# Limits first, then the program; what came of it is written to a pipe that only the end reaches.
_RUNNER = """
import resource, sys
pipe, seconds, megabytes = map(int, sys.argv[1:])
program = sys.stdin.read()
for name, limit in (
  ("AS", megabytes << 20), ("CPU", seconds), ("FSIZE", 1 << 20), ("NOFILE", 64), ("CORE", 0),
  ("NPROC", 0),
):
  number = getattr(resource, "RLIMIT_" + name)
  resource.setrlimit(number, (limit, limit))
try:
  exec(compile(program, "program", "exec"), {"__name__": "__main__"})
  said = "passed"
except BaseException as error:
  said = (type(error).__name__ + ": " + str(error)[:200]).rstrip(": ")
import os
os.write(pipe, said.encode("utf-8", "replace"))
"""


class Outcome(NamedTuple):
  passed: bool  # whether the program came to its end
  reason: str  # PASSED, its exception, or why it was stopped


def run_limited(program: str, *, seconds: float = SECONDS, megabytes: int = MEGABYTES) -> Outcome:
  """Runs Python source to its end, an exception, or a limit."""
  read, write = os.pipe()
  os.set_blocking(read, False)
  arguments = [str(write), str(int(seconds) + 1), str(megabytes)]
  with tempfile.TemporaryDirectory() as folder:
    process = subprocess.Popen(
      [sys.executable, "-I", "-S", "-c", _RUNNER, *arguments],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      pass_fds=(write,),
      cwd=folder,
      env={},
      start_new_session=True,
    )
    try:
      process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
      said = _said(read) or _ended(process.returncode)
    except subprocess.TimeoutExpired:
      said = f"no end within {seconds:g} s"
    finally:
      _kill_group(process)
      os.close(read)
      os.close(write)
  return Outcome(said == PASSED, said)


def _said(pipe: int) -> str:
  try:
    return os.read(pipe, 1000).decode("utf-8", "replace")
  except BlockingIOError:
    return ""


def _ended(code: int) -> str:
  if code == -signal.SIGXCPU:
    return "too much processor time"
  return f"it ended before its tests, with {code}"


def _kill_group(process: subprocess.Popen) -> None:
  """Also what the program has started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
