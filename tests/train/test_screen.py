"""A screen that goes away ends no program."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TALK = """
import sys
from train.screen import Screen
sys.stdout = sys.stdout and Screen(sys.stdout)
for number in range(20_000):
  print(number, flush=number % 2)
sys.exit(42)
"""


def run(shell: str):
  command = f"{sys.executable} -c '{TALK}' {shell}"
  bash = ["bash", "-c", f"set -o pipefail; {command}"]
  return subprocess.run(bash, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("where", ["| head -n 1", "> /dev/full", ">&-"])
def test_a_reader_that_leaves_changes_no_exit_code_and_causes_no_traceback(where):
  done = run(where)
  assert (done.returncode, done.stderr) == (42, "")


def test_the_table_of_verbs_survives_a_full_disk():
  verbs = f"{sys.executable} -m train help > /dev/full"
  done = subprocess.run(["bash", "-c", verbs], cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert (done.returncode, done.stderr) == (0, "")
