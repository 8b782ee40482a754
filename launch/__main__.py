"""`python -m launch <launcher>`: brings a training run to machines, and looks after it there."""

import importlib
import sys
from collections.abc import Sequence

from train.errors import Exit, UsageError, hint, refuse
from train.screen import Screen

LAUNCHERS = {
  "local": "on this machine, restarted after crashes",
  "tpu-vm": "on TPU virtual machines, by gcloud queued resources",
  "gke": "in Google Kubernetes Engine, as a JobSet queued by Kueue",
  "slurm": "on a Slurm cluster of GPU machines, by sbatch",
}
HELP = ("--help", "-h")


def main(argv: Sequence[str]) -> int:
  """Runs a launcher. Returns its exit code."""
  if not argv or argv[0] in (*HELP, "help"):
    print(overview())
    return Exit.DONE if argv else Exit.USAGE
  name, *rest = argv
  if name not in LAUNCHERS:
    known = hint(name, LAUNCHERS, ", ".join(LAUNCHERS))
    return refuse([f"{name} is not a launcher; {known}."])
  module = importlib.import_module(f"launch.{name.replace('-', '_')}")
  if any(word in HELP for word in rest):
    from launch import request  # only now: it loads the libraries of a run

    print(request.help_text(name, module.OPTIONS))
    return Exit.DONE
  try:
    return module.main(rest)
  except UsageError as error:
    return refuse(error.problems)


def overview() -> str:
  """The table of launchers."""
  width = max(map(len, LAUNCHERS))
  rows = [f"  {name:{width}}  {text}" for name, text in LAUNCHERS.items()]
  usage = (
    "python -m launch LAUNCHER --config FILE.py --workdir DIR [--dry-run] [...]; --help says more"
  )
  return "\n".join([usage, "", *rows])


if __name__ == "__main__":
  # A stream that was closed before the start is None.
  sys.stdout, sys.stderr = (s and Screen(s) for s in (sys.stdout, sys.stderr))
  sys.exit(main(sys.argv[1:]))
