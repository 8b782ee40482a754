"""Exit codes are obeyed, signals reach every child once, and no child outlives its supervisor."""

import itertools
import os
import signal
import time

import pytest

from tests.launch.conftest import PATIENCE, alive

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("code", [0, 1, 2, 43])
def test_a_final_code_is_passed_on_without_a_restart(supervise, code):
  run = supervise(str(code))
  assert run.finish() == code
  assert len(run.starts()) == 1


def test_a_saved_run_starts_again_at_once(supervise):
  run = supervise("42 42 0", first_pause=30.0)
  assert run.finish() == 0
  assert len(run.starts()) == 3
  assert "starting again at once" in run.output


def test_pauses_after_crashes_double_up_to_a_longest(supervise):
  run = supervise("7 7 7 7 0", first_pause=0.2, longest_pause=0.5)
  assert run.finish() == 0
  times = [moment for moment, _ in run.starts()]
  pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
  assert all(pause > least for pause, least in zip(pauses, [0.2, 0.4, 0.5, 0.5], strict=True))
  assert [line.rpartition(" in ")[2] for line in run.output.splitlines() if " in " in line] == [
    "0.2 s.",
    "0.4 s.",
    "0.5 s.",
    "0.5 s.",
  ]


def test_a_crash_loop_ends_with_the_last_code(supervise):
  run = supervise("7 7 8", crash_limit=3)
  assert run.finish() == 8
  assert len(run.starts()) == 3
  assert "Giving up after 3 crashes without a new checkpoint" in run.output


def test_a_new_checkpoint_forgives_earlier_crashes(supervise):
  run = supervise("7 save 7 save 7 7", crash_limit=3)
  assert run.finish() == 7
  # 7 is the first crash; each save starts the count at one; then two more make three.
  assert len(run.starts()) == 6


def test_a_killed_child_counts_as_a_crash(supervise):
  run = supervise("die 0")
  assert run.finish() == 0
  assert "exit code 137 (SIGKILL)" in run.output


def test_the_death_of_one_restarts_all(supervise):
  run = supervise("fork-wait 0", "late-die 0", "wait 0")
  assert run.finish() == 0
  for place in range(3):
    assert len(run.starts(place)) == 2
    assert not any(alive(pid) for _, pid in run.starts(place))
  assert not alive(int((run.folder / "worker").read_text())), "a data worker was left behind"
  assert run.signals(2) == [], "a survivor of a crash was asked to save, which it cannot alone"


def test_a_child_that_ends_leaves_no_worker(supervise):
  run = supervise("fork-0")
  assert run.finish() == 0
  assert not alive(int((run.folder / "worker").read_text()))


def test_the_code_that_explains_the_others_wins(supervise):
  run = supervise("134", "late-43", settle_seconds=PATIENCE)
  assert run.finish() == 43
  assert len(run.starts(0)) == 1


def test_one_that_hangs_after_the_others_are_done_is_a_crash(supervise):
  run = supervise("0", "deaf", stop_seconds=0.3, crash_limit=1)
  assert run.finish() == 137
  assert not alive(run.starts(1)[0][1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_child_once_and_no_restart_follows(supervise, number):
  run = supervise("wait", "wait")
  run.wait_for("ready-0", "ready-1")
  os.killpg(run.process.pid, number)  # as a terminal does
  assert run.finish() == 42
  assert run.signals(0) == run.signals(1) == [number]
  assert len(run.starts(0)) == len(run.starts(1)) == 1


def test_a_second_signal_ends_deaf_children_at_once(supervise):
  run = supervise("deaf", "deaf", stop_seconds=PATIENCE)
  run.wait_for("ready-0", "ready-1")
  run.process.send_signal(signal.SIGTERM)
  run.wait_for("signals-0", "signals-1")
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 137
  assert not any(alive(run.starts(place)[0][1]) for place in range(2))


def test_deaf_children_are_ended_after_the_grace(supervise):
  run = supervise("deaf", stop_seconds=0.3)
  run.wait_for("ready-0")
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 137
  assert run.signals() == [signal.SIGTERM]


def test_a_signal_during_a_pause_ends_the_run(supervise):
  run = supervise("7", first_pause=PATIENCE * 2.0)
  run.wait_for("starts-0")
  deadline = time.monotonic() + PATIENCE
  while "starting again in" not in run.output:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 7
  assert len(run.starts()) == 1


def test_nohup_is_respected(supervise):
  run = supervise("wait", inside=["nohup"])
  run.wait_for("ready-0")
  run.process.send_signal(signal.SIGHUP)
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 42
  assert run.signals() == [signal.SIGTERM]
