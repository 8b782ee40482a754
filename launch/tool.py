"""Hands a rendered script or manifest to the program of the cluster, or says that it is missing."""

import shutil
import subprocess
from collections.abc import Sequence

from train.errors import UsageError


def hand_over(program: str, argv: Sequence[str], text: str | None = None) -> int:
  """Runs a command and returns its exit code.

  Args:
    program: what must be installed for it.
    argv: the command.
    text: its standard input; None: ours.

  Raises: UsageError if the program is not installed.
  """
  if shutil.which(program) is None:
    raise UsageError([f"{program} is not installed here; --dry-run prints what it would do."])
  return subprocess.run(argv, input=text, text=True, check=False).returncode
