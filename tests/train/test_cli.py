"""The front door, as a user meets it: real processes, their output and exit codes."""

import pathlib
import subprocess
import sys

import pytest

from train import __main__ as program
from train.__main__ import VERBS

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def train(*argv, cwd=ROOT):
  return subprocess.run(
    [sys.executable, "-m", "train", *argv], cwd=cwd, capture_output=True, text=True, check=False
  )


def test_help_lists_every_verb_and_its_purpose():
  done = train("--help")
  assert done.returncode == 0
  for verb, purpose in VERBS.items():
    assert any(verb in line and purpose in line for line in done.stdout.splitlines())


def test_no_verb_shows_the_table_and_is_wrong_usage():
  assert train().returncode == 2


def test_an_unknown_verb_gets_the_nearest_one():
  done = train("pretrian")
  assert done.returncode == 2
  assert done.stderr == "pretrian is not a verb; the nearest is pretrain.\n"


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_each_verb_is_there_or_says_in_one_sentence_that_it_is_not(verb):
  done = train(verb, "--help")
  there = (ROOT / "train" / f"{verb}.py").exists()
  assert "Traceback" not in done.stderr
  if there:
    assert done.returncode == 0
    assert f"python -m train {verb}" in done.stdout
  else:
    assert (done.returncode, done.stderr) == (2, f"{verb} is not there yet.\n")


def test_doctor_finds_the_devices_and_cleans_up_after_itself(tmp_path):
  done = train("doctor", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stdout
  assert "8 x cpu" in done.stdout
  assert "can be written, read and cleaned" in done.stdout
  assert list(tmp_path.iterdir()) == []


def test_doctor_fails_on_storage_and_configuration(tmp_path):
  (tmp_path / "file").write_text("")
  done = train("doctor", f"--workdir={tmp_path}/file/x", "--config=configs/nano.py")
  assert done.returncode == 1
  failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
  assert any("cannot be written: Not a directory." in line for line in failed)
  assert any("the number of devices is 8." in line for line in failed)
  assert any("data.paths is empty" in line for line in failed)


def test_doctor_names_all_wrong_arguments():
  done = train("doctor", "--wrokdir=x", "--config.seed")
  assert done.returncode == 2
  assert done.stderr.splitlines() == [
    "--wrokdir is not an argument; the nearest is --workdir.",
    "--config.seed needs a value.",
  ]


def test_a_fault_of_ours_is_no_failed_check(monkeypatch, capsys):
  def broken(argv):
    raise ZeroDivisionError("division by zero")

  monkeypatch.setattr(program, "main", broken)
  assert program.run(["doctor"]) == 70
  assert "ZeroDivisionError: division by zero" in capsys.readouterr().err
