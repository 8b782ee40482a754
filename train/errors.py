"""How a program ends: the exit codes, and the errors that carry them."""

import enum
from collections.abc import Sequence


class Exit(enum.IntEnum):
  """Exit codes of `python -m train`; anything else is a crash, to be restarted with back-off."""

  DONE = 0
  CHECK_FAILED = 1
  USAGE = 2  # wrong arguments, configuration or data
  PREEMPTED = 42  # saved; restart me
  STOPPED = 43  # error in the data or the numerics; do not restart
  CRASHED = 70  # a fault of ours, with its traceback; Python's own 1 would read as a failed check


class UsageError(Exception):
  """What is wrong with the arguments: every problem, each a plain sentence."""

  def __init__(self, problems: Sequence[str]):
    super().__init__("\n".join(problems))
    self.problems = tuple(problems)
