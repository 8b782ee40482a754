"""How a program ends: the exit codes, the errors that carry them, and how they reach the user."""

import difflib
import enum
import sys
from collections.abc import Iterable, Sequence


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


def hint(name: str, accepted: Iterable[str], known: str) -> str:
  """The end of a sentence about a name that is not accepted: the nearest one, or `known`."""
  near = difflib.get_close_matches(name, accepted, n=1)
  return f"the nearest is {near[0]}" if near else f"known are {known}"


def refuse(problems: Sequence[str]) -> int:
  """Shows what is wrong, a line each. Returns the exit code of wrong usage."""
  for problem in problems:
    print(problem, file=sys.stderr)
  return Exit.USAGE
