"""`python -m train evaluate`: how good checkpoints are, as a table, as JSON and as exit code."""

from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from train.errors import Exit, UsageError
from train.evaluation import conditions
from train.evaluation.checkpoints import Checkpoint, find_checkpoints
from train.evaluation.opening import open_evaluated
from train.evaluation.request import USAGE, Request, parse
from train.evaluation.results import Results, Samples
from train.evaluation.task import Task
from train.evaluation.tasks import find_tasks, table
from train.generate import lay_mesh
from train.processes import say


def main(argv: Sequence[str]) -> int:
  """Prints a table of results. Returns 0, or 1 where a --fail-if holds; raises UsageError."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE.format(tasks=table()))
    return Exit.DONE
  request = parse(argv)
  tasks = find_tasks(request)
  metrics = {task.name: task.metrics for task in tasks}
  if problems := conditions.problems(request.fail_if, metrics):
    raise UsageError(problems)
  results, samples = Results(request.output), Samples(request.log_samples)
  failed = []
  with jax.set_mesh(lay_mesh(request.mesh)):
    for checkpoint in find_checkpoints(request.checkpoint, request.step):
      record = evaluate(checkpoint, tasks, request, results, samples)
      show(checkpoint, record, tasks)
      failed += conditions.failed(request.fail_if, record["results"])
  for sentence in failed:
    print(sentence)
  return Exit.CHECK_FAILED if failed else Exit.DONE


def evaluate(
  checkpoint: Checkpoint,
  tasks: Sequence[Task],
  request: Request,
  results: Results,
  samples: Samples,
) -> dict[str, Any]:
  """The record of a checkpoint, with all tasks. Those that it has already are not computed again.

  Raises: UsageError for a checkpoint that cannot be used, and before anything is computed.
  """
  mesh = lay_mesh(request.mesh)
  model, sha256 = open_evaluated(checkpoint, request, mesh), checkpoint.sha256()
  record = results.record(model, sha256, request)
  left = [task for task in tasks if not results.done(record, task)]
  if problems := [p for task in left for p in task.problems(model, request)]:
    raise UsageError(problems)
  for task in tasks:
    if task not in left:
      say(f"{task.name} of {checkpoint.name} is in {request.output} already.")
      continue
    say(f"{task.name} of {checkpoint.name} ...")
    logged: list[Any] = []
    metrics = task.run(model, request, logged.append)
    samples.write(sha256, task, checkpoint.step, logged)
    results.add(record, task, metrics)
  return record


def show(checkpoint: Checkpoint, record: dict[str, Any], tasks: Sequence[Task]) -> None:
  """The numbers of a record's tasks; tables that are metrics are left out."""
  shown = Table(title=checkpoint.name, title_justify="left")
  for column in ("task", "metric", "value"):
    shown.add_column(column, justify="right" if column == "value" else "left")
  for task in tasks:
    for metric, value in record["results"][task.name].items():
      if not isinstance(value, list):
        shown.add_row(task.name, metric, "none" if value is None else f"{value:.6g}")
  Console().print(shown)
