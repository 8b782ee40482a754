"""`python -m train <verb>`: the table of programs, and how their errors reach the user."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence

from train.errors import Exit, UsageError, hint, refuse
from train.screen import Screen

VERBS = {
  "doctor": "check devices, versions, storage and the mesh before a run",
  "prepare": "turn raw text into a tokenizer and packed shards",
  "pretrain": "train a model from its beginning, or continue",
  "sft": "fine-tune on conversations, with replay",
  "distill": "train a student on its teachers' distributions",
  "rl": "train on rewards",
  "dspark": "train the speculative drafter",
  "evaluate": "measure checkpoints",
  "generate": "write text with a checkpoint",
  "plan": "count parameters, memory and FLOPs without hardware",
  "convert": "read and write the released weights",
  "verify": "compare a forward pass with stored reference traces",
  "inspect": "look into a checkpoint",
  "ablate": "train variants of a configuration and compare them",
  "report": "draw what a run folder holds",
}
TRAINING = ("pretrain", "sft", "distill", "rl", "dspark")  # the verbs with --config and --workdir
HELP = ("--help", "-h")


def main(argv: Sequence[str]) -> int:
  """Runs a verb. Returns its exit code."""
  if not argv or argv[0] in (*HELP, "help"):
    print(overview())
    return Exit.DONE if argv else Exit.USAGE
  verb, *rest = argv
  if verb not in VERBS:
    known = hint(verb, VERBS, ", ".join(VERBS))
    return refuse([f"{verb} is not a verb; {known}."])
  if importlib.util.find_spec(f"train.{verb}") is None:
    return refuse([f"{verb} is not there yet."])
  if verb in TRAINING and any(word in HELP for word in rest):
    from train import settings  # only now: it loads the libraries of a run

    print(settings.help_text(verb))
    return Exit.DONE
  try:
    return importlib.import_module(f"train.{verb}").main(rest)
  except UsageError as error:
    return refuse(error.problems)


def overview() -> str:
  """The table of verbs."""
  there = {verb: importlib.util.find_spec(f"train.{verb}") is not None for verb in VERBS}
  width = max(map(len, VERBS))
  rows = [
    f"  {verb:{width}}  {text}{'' if there[verb] else ' (not there yet)'}"
    for verb, text in VERBS.items()
  ]
  return "\n".join(["python -m train VERB [...]; VERB --help says more", "", *rows])


def run(argv: Sequence[str]) -> int:
  """As main; an exception that nobody expected is shown and becomes an exit code of its own."""
  try:
    return main(argv)
  except Exception:  # noqa: BLE001, whatever it is: the launcher must not take it for a result
    traceback.print_exc()
    return Exit.CRASHED


if __name__ == "__main__":
  # A stream that was closed before the start is None.
  sys.stdout, sys.stderr = (s and Screen(s) for s in (sys.stdout, sys.stderr))
  code = run(sys.argv[1:])
  if code == Exit.CRASHED:  # JAX would wait for the other processes before it lets this one end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
