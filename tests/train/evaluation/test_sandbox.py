"""Programs run with limits that hold."""

import pathlib
import time

import pytest

from train.evaluation.sandbox import PASSED, run_limited


@pytest.mark.parametrize(
  ("program", "reason"),
  [
    ("assert 1 + 1 == 2", PASSED),
    ("print('x' * 10**6)", PASSED),
    ("assert 1 + 1 == 3, 'no'", "AssertionError: no"),
    ("def f(:", "SyntaxError: "),
    ("import os; os._exit(0)", "it ended before its tests, with 0"),
    ("raise SystemExit", "SystemExit"),
    ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
    ("open('large', 'wb').write(bytes(2**21))", "OSError: [Errno 27] File too large"),
    ("import os; assert 'PATH' not in os.environ and os.listdir() == []", PASSED),
  ],
)
def test_what_came_of_a_program(program, reason):
  outcome = run_limited(program)
  assert outcome.reason.startswith(reason)
  assert outcome.passed == (reason == PASSED)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_without_end_is_stopped(program):
  start = time.monotonic()
  assert run_limited(program, seconds=0.5).reason == "no end within 0.5 s"
  assert time.monotonic() - start < 30


def test_a_program_cannot_take_more_memory_than_it_may():
  hog = "parts = []\nwhile True: parts.append(bytes(10**6))"
  assert run_limited(hog, megabytes=200).reason == "MemoryError"


def test_what_a_program_started_ends_with_it(tmp_path):
  mark = tmp_path / "child"
  program = f"""
import os, time
if os.fork() == 0:
  open({str(mark)!r}, "w").write(str(os.getpid()))
  time.sleep(60)
while not os.path.exists({str(mark)!r}) or not open({str(mark)!r}).read(): time.sleep(0.01)
"""
  outcome = run_limited(program)
  if not outcome.passed:  # not root: no process may be started at all
    assert outcome.reason.startswith("BlockingIOError")
    return
  number = int(mark.read_text())
  deadline = time.monotonic() + 30
  while _runs(number):
    assert time.monotonic() < deadline
    time.sleep(0.01)


def _runs(number):
  try:
    stat = pathlib.Path(f"/proc/{number}/stat").read_text()
  except (ProcessLookupError, FileNotFoundError):
    return False
  return stat.rpartition(")")[2].split()[0] != "Z"
