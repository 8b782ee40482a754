"""`python -m train evaluate`: how good checkpoints are, as a table, as JSON and as exit code."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from deepseek_jax.storage_path import cache_folder
from train import processes
from train.arguments import lay_mesh
from train.errors import Exit, UsageError
from train.evaluation import conditions
from train.evaluation.checkpoints import Checkpoint, find_checkpoints
from train.evaluation.opening import open_evaluated
from train.evaluation.request import USAGE, Request, parse
from train.evaluation.results import Results, Samples
from train.evaluation.task import Task
from train.evaluation.tasks import find_tasks, table
from train.evaluation.watch import appearing
from train.pretrain import join_and_find_devices
from train.processes import say, warn
from train.signals import StopSignal


def main(argv: Sequence[str]) -> int:
  """Prints a table of results. Returns 0, or 1 where a --fail-if holds; raises UsageError."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE.format(tasks=table()))
    return Exit.DONE
  join_and_find_devices()
  with processes.agreed():
    request, tasks, notes, mesh = understand(argv)
  notes.results.share()
  keep_compiled()
  failed = []
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.set_mesh(mesh))
    stopped = lambda: False
    if request.watch:
      stop = stack.enter_context(StopSignal(warn, promise="stopping after this task"))
      stopped = lambda: stop.requested
      found = appearing(request.checkpoint, request.step, stopped)
    else:
      found = _everywhere(find_checkpoints(request.checkpoint, request.step))
    for checkpoint in found:
      try:
        record = evaluate(checkpoint, tasks, request, mesh, notes, stopped)
      except UsageError:
        if request.watch and not checkpoint.is_there():
          warn(f"{checkpoint.name} was removed before it was read; it is left out.")
          continue
        raise
      if processes.first():
        show(checkpoint, record, tasks)
      measured = {t.name: record["results"].get(t.name, {}) for t in tasks}
      failed += conditions.failed(request.fail_if, measured)
  for sentence in failed:
    say(sentence)
  return Exit.CHECK_FAILED if failed else Exit.DONE


def keep_compiled() -> None:
  """The next checkpoint of a run is not compiled for again, nor the next evaluation."""
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))


def _everywhere(found: list[Checkpoint]) -> list[Checkpoint]:
  """The checkpoints, if all processes see the same."""
  seen = processes.gather([str(checkpoint.path) for checkpoint in found])
  if any(names != seen[0] for names in seen):
    raise UsageError(["The processes find different checkpoints; they need a shared folder."])
  return found


class Notes(NamedTuple):
  """Where what is measured is kept."""

  results: Results
  samples: Samples


def understand(argv: Sequence[str]) -> tuple[Request, list[Task], Notes, Mesh]:
  """The command line, with what it names. Raises UsageError with every problem of both."""
  request, problems = parse(argv), []

  def tried(make: Callable[[], Any]) -> Any:
    try:
      return make()
    except UsageError as error:
      problems.extend(error.problems)

  tasks = tried(lambda: find_tasks(request))
  notes = Notes(tried(lambda: Results(request.output)), tried(lambda: Samples(request.log_samples)))
  mesh = tried(lambda: lay_mesh(request.mesh))
  if request.watch and jax.process_count() > 1:
    problems.append(f"--watch is for one process, there are {jax.process_count()}.")
  if not request.watch:
    tried(lambda: find_checkpoints(request.checkpoint, request.step))
  if tasks:
    metrics = {task.name: task.metrics for task in tasks}
    problems += conditions.problems(request.fail_if, metrics)
  if problems:
    raise UsageError(problems)
  return request, tasks, notes, mesh


def evaluate(
  checkpoint: Checkpoint,
  tasks: Sequence[Task],
  request: Request,
  mesh: Mesh,
  notes: Notes,
  stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
  """The record of a checkpoint, with all tasks. Those that it has already are not computed again.

  Args:
    stopped: asked before each task; then the record has the tasks before it.

  Raises: UsageError for a checkpoint that cannot be used, and before anything is computed.
  """
  with processes.agreed():
    model = open_evaluated(checkpoint, request, mesh)
    record = notes.results.record(model, request)
    left = [task for task in tasks if not notes.results.done(record, task)]
    if problems := [p for task in left for p in task.problems(model, request)]:
      raise UsageError(problems)
  for task in tasks:
    if task not in left:
      say(f"{task.name} of {checkpoint.name} is in {request.output} already.")
    elif not stopped():
      say(f"{task.name} of {checkpoint.name} ...")
      logged: list[Any] = []
      metrics = task.run(model, request, logged.append)
      notes.samples.write(record, task, logged)
      notes.results.add(record, task, metrics)
  return record


def show(checkpoint: Checkpoint, record: dict[str, Any], tasks: Sequence[Task]) -> None:
  """The numbers of a record's tasks; tables that are metrics are left out."""
  shown = Table(title=checkpoint.name, title_justify="left")
  for column in ("task", "metric", "value"):
    shown.add_column(column, justify="right" if column == "value" else "left")
  for task in tasks:
    for metric, value in record["results"].get(task.name, {}).items():
      if not isinstance(value, list):
        shown.add_row(task.name, metric, "none" if value is None else f"{value:.6g}")
  Console().print(shown)
