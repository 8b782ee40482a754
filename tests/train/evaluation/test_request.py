"""The command line of `evaluate`: every problem is a sentence, and all of them are told."""

import pytest

from tests.train.evaluation.conftest import request
from train.__main__ import main
from train.errors import Exit
from train.evaluation.conditions import Condition


@pytest.mark.parametrize(
  ("words", "sentences"),
  [
    ([], ["--checkpoint is missing.", "--tasks is missing."]),
    (["--task=a"], ["--task is not an argument; the nearest is --tasks."]),
    (["--config.seed=1"], ["--config.seed is not an argument"]),
    (["--step=last"], ["--step is 'last', accepted are latest, all and the number of a step."]),
    (["--watch", "--step=3"], ["--step 3 is one step; --watch goes with latest or all."]),
    (
      ["--limit=0", "--rows=x"],
      ["--limit must be at least 1, got 0.", "--rows must be an integer"],
    ),
    (["--seed=-1"], ["--seed must be from 0 to 2147483647, got -1."]),
    (["--cache=fp8"], ["--cache is 'fp8', accepted are packed and plain."]),
    (["--mesh=fsd=2"], ["--mesh is fsd=2, accepted are AXIS=DEVICES,... with the axes replica"]),
    (["--fail-if=a", "--fail-if", "b >"], ["--fail-if is 'a'", "--fail-if is 'b >'"]),
    (["--fail-if"], ["--fail-if needs a value."]),
    (["--output=ftp://a/b"], ["--output must be a local folder or one of s3://"]),
  ],
)
def test_every_problem_of_the_arguments_is_one_sentence(words, sentences, capsys):
  assert main(["evaluate", *words]) == Exit.USAGE
  error = capsys.readouterr().err
  assert all(sentence in error for sentence in sentences)
  assert "Traceback" not in error


def test_what_the_arguments_name_is_looked_at_before_anything_is_computed(tmp_path, capsys):
  (tmp_path / "results.json").write_text("{}")
  (tmp_path / "samples.jsonl").write_text("[1]\n")
  words = ["--tasks=perplexty,perplexity:x,multiple_choice,perplexity,perplexity"]
  words += [f"--output={tmp_path}/results.json", f"--log-samples={tmp_path}/samples.jsonl"]
  words += [f"--checkpoint={tmp_path}", "--mesh=fsdp=99", "--fail-if=a > 1"]
  assert main(["evaluate", *words]) == Exit.USAGE
  assert capsys.readouterr().err.splitlines() == [
    "--tasks perplexty is not a task; the nearest is perplexity.",
    "--tasks perplexity:x has not the form perplexity.",
    "--tasks multiple_choice has not the form multiple_choice:FILE.jsonl.",
    "--tasks names perplexity twice.",
    f"--output {tmp_path}/results.json is there and holds no results of evaluate.",
    f"--log-samples {tmp_path}/samples.jsonl is there and holds no samples of evaluate.",
    "--mesh needs 99 devices, there are 8.",
    f"--checkpoint {tmp_path} is no run folder with a complete step, no step, and no release.",
  ]
  assert (tmp_path / "results.json").read_text() == "{}"


def test_files_that_could_not_be_written_at_the_end_are_refused_at_the_start(tmp_path, capsys):
  words = ["--checkpoint=nowhere", "--tasks=perplexity", f"--output={tmp_path}/none/r.json"]
  assert main(["evaluate", *words, f"--log-samples={tmp_path}"]) == Exit.USAGE
  error = capsys.readouterr().err
  assert f"--output {tmp_path}/none/r.json cannot be written: no such folder to write to." in error
  assert f"--log-samples {tmp_path} cannot be read: Is a directory." in error


def test_conditions_may_be_given_several_times():
  asked = request("run", "--fail-if=a>1", "--fail-if", "b.c < 2", "--limit=3")
  assert asked.fail_if == (Condition("a", ">", 1.0), Condition("b.c", "<", 2.0))
  assert asked.limit == 3


def test_an_unknown_metric_is_refused(capsys):
  words = ["--checkpoint=nowhere", "--tasks=perplexity", "--fail-if=perplexity.bits_per_bite>1"]
  assert main(["evaluate", *words]) == Exit.USAGE
  assert "the nearest is perplexity.bits_per_byte." in capsys.readouterr().err


def test_help_lists_the_tasks(capsys):
  assert main(["evaluate", "--help"]) == Exit.DONE
  assert "  multiple_choice:FILE.jsonl  " in capsys.readouterr().out
