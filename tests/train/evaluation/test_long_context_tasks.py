"""The tasks on long text, asked of a model: tables that are those of the problems."""

import json

import numpy as np
import pytest

from data.tasks.riddles import RUN
from tests.train.evaluation.conftest import request
from train.__main__ import main
from train.errors import Exit, UsageError
from train.evaluation.long_context import DEPTHS, REPEATS
from train.evaluation.tasks import find_tasks


def task_of(folder, name, *words):
  asked = request(folder, f"--tasks={name}", *words)
  (task,) = find_tasks(asked)
  return task, asked


def test_a_table_holds_the_means_of_its_problems(model, trained):
  task, asked = task_of(trained, "induction:40+60", "--limit=12")
  assert task.problems(model, asked) == []
  logged = []
  found = task.run(model, asked, logged.append)
  assert found["lengths"] == [40, 60] and found["depths"] == list(DEPTHS)
  assert len(logged) == 12
  for name in ("accuracy", "token_accuracy", "log_likelihood"):
    for length, row in zip(found["lengths"], found[name], strict=True):
      for depth, value in zip(found["depths"], row, strict=True):
        own = [p[name] for p in logged if (p["length"], p["depth"]) == (length, depth)]
        assert value == pytest.approx(np.mean(own))
    assert found[f"mean_{name}"] == pytest.approx(np.mean([p[name] for p in logged]))
  assert found["mean_log_likelihood"] < 0, "and it was the answer that was looked at"
  assert all(p["answer_tokens"] == RUN for p in logged)


def test_what_is_not_measured_is_no_number(model, trained):
  task, asked = task_of(trained, "induction:40+60", "--limit=1")
  found = task.run(model, asked, lambda problem: None)
  cells = [value for row in found["accuracy"] for value in row]
  assert cells[0] is not None and cells[1:] == [None] * (2 * len(DEPTHS) - 1)


def test_lengths_and_borders_that_cannot_be_are_sentences(model, trained):
  problems = lambda name: (lambda t: t[0].problems(model, t[1]))(task_of(trained, name))
  assert problems("needle:20")[0].startswith("needle:20: a length of 20 tokens is too short")
  assert "the validation split has" in problems("copy:1000000")[0]
  assert problems("needle_entry:100") == [
    "needle_entry:100: entries and pool blocks of this model have no such border."
  ], "pairs and blocks of nano have the same borders"
  assert problems("needle_inside:100") == problems("needle_block:100") == []
  for name in ("needle:a", "needle:0", "needle:5-6"):
    with pytest.raises(UsageError, match="--tasks needle:"):
      task_of(trained, name)
  assert REPEATS > 1


def test_the_command_writes_tables_and_fails_where_it_is_told_to(trained, tmp_path):
  task, output = "induction:40+60", tmp_path / "results.json"
  words = ["evaluate", f"--checkpoint={trained}", "--rows=2", f"--tasks={task}", "--limit=10"]
  condition = f"--fail-if={task}.mean_accuracy < 2"
  assert main([*words, f"--output={output}", condition]) == Exit.CHECK_FAILED
  (record,) = json.loads(output.read_text())
  found = record["results"][task]
  assert np.shape(found["accuracy"]) == (len(found["lengths"]), len(found["depths"])) == (2, 5)
  assert main([*words, f"--output={output}", condition.replace("< 2", "> 1")]) == Exit.DONE
