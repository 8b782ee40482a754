"""The tasks of `evaluate`, by name."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from train.errors import UsageError, hint
from train.evaluation import (
  exact_match,
  humaneval,
  inside,
  lm_eval_tasks,
  long_context,
  multiple_choice,
  perplexity,
  serving,
)
from train.evaluation.request import Request
from train.evaluation.task import Task


class Kind(NamedTuple):
  about: str
  make: Callable[[str, str, Request], Task]  # name, what follows its colon; raises UsageError
  takes: str = ""  # what may follow the colon; "" nothing, in brackets if it may be left out


REGISTRY = {
  "perplexity": Kind("bits per byte of the validation part of the data", perplexity.make),
  "multiple_choice": Kind(
    "accuracy of the likeliest choice; lines of context, choices, answer",
    multiple_choice.make,
    "FILE.jsonl",
  ),
  "exact_match": Kind(
    "share of answers that are written; lines of prompt, answer[, stop, max_new_tokens]",
    exact_match.make,
    "FILE.jsonl",
  ),
  "humaneval": Kind(
    "likelihood of its solutions; with --execute also pass@k", humaneval.make, "[FILE.jsonl]"
  ),
  "lm_eval": Kind(
    "a task of lm-eval (extra `eval`), by name or from a file", lm_eval_tasks.make, "TASK|FILE.yaml"
  ),
  **{name: Kind(about, make, "[TOKENS+...]") for name, (about, make) in long_context.TASKS.items()},
  "early_exit": Kind("exact against early exit, by distance from the prompt", serving.early_exit),
  "prefix_continued": Kind("exact against a prefix without windows", serving.prefix_continued),
  "fp4": Kind("compressed entries without and with FP4", serving.fp4),
  "pool": Kind("without and with the candidate pool", serving.pool),
  "engram": Kind("with and without Engram", serving.engram),
  "recall": Kind("attention that chosen entries and the pool catch, by layer", inside.recall),
  "experts": Kind("load of every expert, by layer", inside.experts),
}


def find_tasks(request: Request) -> list[Task]:
  """The tasks that were asked for, in that order. Raises UsageError with every problem."""
  tasks, problems = [], []
  for name in request.tasks:
    kind, colon, rest = name.partition(":")
    try:
      if kind not in REGISTRY:
        known = hint(kind, REGISTRY, ", ".join(map(_form, REGISTRY)))
        raise UsageError([f"--tasks {name} is not a task; {known}."])
      takes = REGISTRY[kind].takes
      if bool(colon and rest) < bool(takes and takes[0] != "[") or (colon and not takes):
        raise UsageError([f"--tasks {name} has not the form {_form(kind)}."])
      tasks.append(REGISTRY[kind].make(name, rest, request))
    except UsageError as error:
      problems += error.problems
  problems += [] if request.tasks else [f"--tasks names none of {', '.join(REGISTRY)}."]
  problems += [f"--tasks names {n} twice." for n in _twice(request.tasks)]
  if problems:
    raise UsageError(problems)
  return tasks


def table() -> str:
  """A line for each task."""
  width = max(len(_form(name)) for name in REGISTRY)
  return "\n".join(f"  {_form(name):{width}}  {kind.about}" for name, kind in REGISTRY.items())


def _form(name: str) -> str:
  takes = REGISTRY[name].takes
  if takes.startswith("["):
    return f"{name}[:{takes.strip('[]')}]"
  return f"{name}:{takes}" if takes else name


def _twice(names: Sequence[str]) -> list[str]:
  return sorted({name for name in names if names.count(name) > 1})
