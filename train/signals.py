"""SIGTERM, SIGINT, SIGHUP: the first asks the run to save and stop, the second ends it at once.

Python runs signal handlers only between two bytecodes of the main thread, which may be inside a
compiled step or a compilation for a minute. So the handlers do nothing; a thread reads the signal
numbers that the interpreter writes into a pipe at once.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last: the terminal was closed
SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides it, and an exit at once does not bring it back
GRACE_SECONDS = 300.0  # to finish the step and save it; clouds give 30 s to a few minutes


class StopSignal:
  """Context manager, entered on the main thread; `requested` turns true at the first signal.

  Args:
    report: takes one sentence; called from another thread.
    grace_seconds: after the first signal the process ends by itself when these are over. The
      checkpoint before the one being written stays good.
    promise: what the first signal leads to, as it is reported.

  A second signal, or the end of the grace time, ends the process with status 128 + signal number.
  In a run of several processes each has its own; train/processes.py keeps JAX from taking SIGTERM
  over (its preemption service hides the second one from Python), and `Flags` tells the others.
  """

  def __init__(
    self,
    report: Callable[[str], None],
    *,
    grace_seconds: float = GRACE_SECONDS,
    signals: tuple[signal.Signals, ...] = SIGNALS,
    promise: str = "saving after this step, then stopping",
  ) -> None:
    self._report, self._grace_seconds, self._signals = report, grace_seconds, signals
    self._promise = promise
    self._requested = threading.Event()

  @property
  def requested(self) -> bool:
    return self._requested.is_set()

  def __enter__(self) -> Self:
    self._read, self._write = os.pipe()
    os.set_blocking(self._write, False)  # what set_wakeup_fd asks for
    self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
    self._before = replace_handlers(_do_nothing, self._signals)
    self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
    self._watcher.start()
    return self

  def __exit__(self, *error: object) -> None:
    restore_handlers(self._before)
    signal.set_wakeup_fd(self._wakeup_before)
    os.close(self._write)  # ends the watcher
    self._watcher.join()
    os.close(self._read)

  def _watch(self) -> None:
    first = self._next_signal(None)
    if first is None:
      return
    self._requested.set()
    name = signal.Signals(first).name
    self._report(f"{name}: {self._promise}; a second signal stops at once.")
    second = self._next_signal(self._grace_seconds)
    if second is None:
      return
    why = f"no end within {self._grace_seconds:g} s" if second == 0 else "second signal"
    self._report(f"Stopping at once ({why}); the last complete checkpoint is good.")
    if sys.stdout.isatty():
      print(SHOW_CURSOR, end="", flush=True)
    os._exit(128 + (second or first))

  def _next_signal(self, timeout: float | None) -> int | None:
    """Number of the next of our signals; 0 when the time is over, None when the pipe is closed."""
    while select.select([self._read], [], [], timeout)[0]:
      received = os.read(self._read, 1)
      if not received:
        return None
      if received[0] in self._signals:
        return received[0]
    return 0


def replace_handlers(handler: Callable, signals: tuple[signal.Signals, ...] = SIGNALS) -> dict:
  """Sets the handler of each signal; returns those before, for `restore_handlers`.

  A SIGHUP that is ignored stays so: that is what nohup is for. The others are heard in any case; a
  shell starts background programs with SIGINT ignored, and yet `kill -INT` must reach them.
  """
  ignored = lambda number: signal.getsignal(number) == signal.SIG_IGN
  heard = [number for number in signals if number != signal.SIGHUP or not ignored(number)]
  return {number: signal.signal(number, handler) for number in heard}


def restore_handlers(before: dict) -> None:
  for number, handler in before.items():
    signal.signal(number, handler)


def _do_nothing(number: int, frame: object) -> None:
  """A handler must exist, or the signal would end the process."""
