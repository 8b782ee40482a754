"""Runs the processes of a training run until they are done, by the exit codes of train/errors.py.

0 ends it; 1, 2 and 43 end it and are passed on; 42 starts all again at once; anything else is a
crash and starts all again after a pause that doubles, until too many follow one another without a
new checkpoint. When one of several processes dies, all are ended and all are started again: JAX has
no way of going on without one.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from launch.processes import Command, Processes
from train.errors import Exit
from train.signals import GRACE_SECONDS, replace_handlers, restore_handlers

FINAL = (Exit.CHECK_FAILED, Exit.USAGE, Exit.STOPPED)  # starting again would not help
ORDERLY = (Exit.DONE, Exit.PREEMPTED)
KILLED = 128 + signal.SIGKILL
POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  crash_limit: int = 5  # crashes in a row without a new checkpoint; the last one ends the run
  first_pause: float = 5.0  # seconds after a crash, doubled for each further one
  longest_pause: float = 300.0
  # A process ends by itself at the end of its own grace; this is for one that cannot.
  stop_seconds: float = GRACE_SECONDS + 30
  settle_seconds: float = 5.0  # after one process failed: others may be failing for the same reason


def supervise(
  commands: Callable[[], Sequence[Command]],
  *,
  newest_checkpoint: Callable[[], int | None],
  report: Callable[[str], None],
  policy: Policy | None = None,
) -> int:
  """Runs to the end of the run and returns its exit code. Called on the main thread.

  SIGTERM, SIGINT and SIGHUP are passed on to every process, once; then the code with which the
  processes end is returned, whatever it is. A second one ends the processes at once.

  Args:
    commands: asked before each attempt, so that it can choose a free port.
    newest_checkpoint: step of the newest complete checkpoint.
    report: takes one sentence.
    policy: None is the default one.
  """
  policy = policy or Policy()
  crashes, newest = 0, newest_checkpoint()
  with StopRequests() as stop:
    while True:
      code = _attempt(commands(), stop, policy, report)
      if stop.received or code == Exit.DONE or code in FINAL:
        return code
      if code == Exit.PREEMPTED:
        report("Preempted and saved; starting again at once.")
        continue
      before, newest = newest, newest_checkpoint()
      crashes = 1 if newest != before else crashes + 1
      if crashes >= policy.crash_limit:
        report(f"Giving up after {crashes} crashes without a new checkpoint between them.")
        return code
      pause = min(policy.first_pause * 2 ** (crashes - 1), policy.longest_pause)
      report(
        f"Crash {crashes} of at most {policy.crash_limit} without a new checkpoint; starting again "
        f"in {pause:g} s."
      )
      if stop.wait(pause):
        return code


class StopRequests:
  """Context manager that collects SIGTERM, SIGINT and SIGHUP."""

  def __init__(self) -> None:
    self.received: list[int] = []

  def __enter__(self) -> Self:
    self._before = replace_handlers(lambda number, frame: self.received.append(number))
    return self

  def __exit__(self, *error: object) -> None:
    restore_handlers(self._before)

  def wait(self, seconds: float) -> bool:
    """Waits, unless or until a request comes; whether one has come."""
    until = time.monotonic() + seconds
    while not self.received and time.monotonic() < until:
      time.sleep(POLL_SECONDS)
    return bool(self.received)


def _attempt(
  commands: Sequence[Command], stop: StopRequests, policy: Policy, report: Callable[[str], None]
) -> int:
  """Starts all, waits for all, and leaves none behind; the code of the attempt."""
  sent, until = 0, float("inf")
  with Processes(commands) as processes:
    while processes.running and time.monotonic() < until:
      if stop.received and sent == 0:
        processes.send(stop.received[0])
        until = min(until, time.monotonic() + policy.stop_seconds)
      sent = len(stop.received)
      if sent > 1:
        break
      known = len(processes.ended)
      processes.poll()
      if len(processes.ended) > known:
        orderly = all(code in ORDERLY for code in processes.ended.values())
        patience = policy.stop_seconds if orderly else policy.settle_seconds
        until = min(until, time.monotonic() + patience)
      else:
        time.sleep(POLL_SECONDS)
    hung = processes.running
    for place, code in processes.ended.items():
      if code not in ORDERLY:
        report(f"Process {place} of {len(commands)} ended with {_name(code)}.")
    if hung:
      report(f"Ending {hung} of {len(commands)} processes that are still running.")
  return _verdict(processes.ended, hung=bool(hung))


def _verdict(ended: Mapping[int, int], *, hung: bool) -> int:
  """One code for all: what ended by itself says more than what died of it."""
  codes = list(ended.values())  # in the order of ending
  for meant in (
    [code for code in codes if code in FINAL],
    [code for code in codes if code not in ORDERLY],
    [KILLED] * hung,
    [code for code in codes if code == Exit.PREEMPTED],
  ):
    if meant:
      return meant[0]
  return Exit.DONE


def _name(code: int) -> str:
  try:
    return f"exit code {code} ({signal.Signals(code - 128).name})"
  except ValueError:
    return f"exit code {code}"
