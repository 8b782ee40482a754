"""A run that was interrupted continues exactly: its lines equal those of an uninterrupted one."""

import os
import random
import signal

import pytest

from train.errors import Exit

pytestmark = pytest.mark.slow

# Long enough to be interrupted at a random step, short enough to be run again and again.
STEPS = {"total_steps": 40, "checkpoint__every_steps": 5, "validation__every_steps": 10}


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
  code, output = runs.finish(workdir, **STEPS)
  assert code == Exit.DONE, output
  return runs.lines(workdir)


def test_killed_at_random_steps_it_ends_with_the_same_lines(runs, uninterrupted, tmp_path):
  workdir = tmp_path / "run"
  for step in sorted(random.sample(range(1, 39), 2)):
    process = runs.start(workdir, **STEPS)
    runs.wait_for_step(workdir, step, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
  code, output = runs.finish(workdir, **STEPS)
  assert code == Exit.DONE, output
  assert runs.lines(workdir) == uninterrupted


def test_asked_to_stop_it_saves_that_step_and_goes_on_after_it(runs, uninterrupted, tmp_path):
  workdir = tmp_path / "run"
  process = runs.start(workdir, **STEPS)
  runs.wait_for_step(workdir, 7, process)
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == Exit.PREEMPTED, runs.output(workdir)
  stopped = len(runs.lines(workdir))
  assert (workdir / "checkpoints" / str(stopped) / "manifest.json").exists()
  assert runs.lines(workdir) == uninterrupted[:stopped]
  code, output = runs.finish(workdir, **STEPS)
  assert code == Exit.DONE, output
  assert f"Continuing after step {stopped}." in output
  assert runs.lines(workdir) == uninterrupted


def test_a_damaged_checkpoint_is_passed_over_without_a_trace_in_the_lines(
  runs, uninterrupted, tmp_path
):
  workdir = tmp_path / "run"
  process = runs.start(workdir, **STEPS)
  runs.wait_for_step(workdir, 17, process)
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  complete = (int(path.parent.name) for path in workdir.glob("checkpoints/*/manifest.json"))
  newest = max(complete)
  largest = max(
    (workdir / "checkpoints" / str(newest) / "params").rglob("*"),
    key=lambda path: path.stat().st_size if path.is_file() else 0,
  )
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  code, output = runs.finish(workdir, **STEPS)
  assert code == Exit.DONE, output
  assert f"Checkpoint {newest} is damaged" in output
  assert runs.lines(workdir) == uninterrupted
