"""`python -m train pretrain` as several processes does what one process does, also when it is
stopped, killed or refused."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.train.several import DEVICES, MODEL, PATIENCE, ROOT, Together, environment, run
from train.errors import Exit
from train.run_folder import open_run_folder

pytestmark = pytest.mark.slow

STEPS = 24  # enough to be stopped on the way; the same for all, so that they share programs
RUN = MODEL | {
  "mesh__fsdp": DEVICES,
  "total_steps": STEPS,
  "checkpoint__every_steps": 4,
  "checkpoint__keep_last": 10,
  "validation__every_steps": 12,
}
# Relative, in the first six steps. The rows of a batch stand in another order, and sums go over
# another network: gloo between processes, threads inside one. Later the roundings have grown: a
# token that changes its expert changes the third digit of a loss.
TOLERANCES = {"loss": 1e-5, "validation_bits_per_byte": 1e-5, "grad_norm": 1e-4}
LATER = 100  # times as much


def command(runs, workdir, **changes):
  return ("-m", "train", "pretrain", *runs.argv(workdir, **(RUN | changes)))


def same(lines, others):
  """Loss by loss and count by count."""
  assert [line["step"] for line in lines] == [line["step"] for line in others]
  for one, other in zip(lines, others, strict=True):
    assert one["tokens"] == other["tokens"]
    for name in TOLERANCES.keys() & (one.keys() | other.keys()):
      rtol = TOLERANCES[name] * (1 if one["step"] <= 6 else LATER)
      np.testing.assert_allclose(
        one[name], other[name], rtol=rtol, err_msg=f"{name} of step {one['step']}"
      )


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
  """The lines of one process with all the devices."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  codes, outputs = run(workdir.parent, 1, command(runs, workdir))
  assert codes == [Exit.DONE], outputs
  return runs.lines(workdir)


@pytest.fixture(scope="module")
def two(runs, tmp_path_factory):
  """The folder of two processes, and what each printed."""
  workdir = tmp_path_factory.mktemp("two") / "run"
  codes, outputs = run(workdir.parent, 2, command(runs, workdir))
  assert codes == [Exit.DONE] * 2, outputs
  return workdir, outputs


def test_two_processes_train_like_one_and_the_first_speaks_for_both(runs, alone, two):
  workdir, (spoken, silent) = two
  same(runs.lines(workdir), alone)
  assert any(line.startswith(f"step {STEPS}/{STEPS}") for line in spoken)
  assert any("bits per byte" in line for line in spoken)
  assert silent == []
  assert len(list(workdir.glob("events.out.*"))) == 1


@pytest.mark.parametrize("count", [1, 4])
def test_what_two_saved_one_and_four_continue(runs, alone, two, tmp_path, count):
  workdir = shutil.copytree(two[0], tmp_path / "run")
  for step in range(8, STEPS + 1, 4):
    shutil.rmtree(workdir / "checkpoints" / str(step))
  codes, outputs = run(tmp_path, count, command(runs, workdir))
  assert codes == [Exit.DONE] * count, outputs
  assert "Continuing after step 4." in outputs[0]
  same(runs.lines(workdir), alone)


def test_asked_to_stop_one_of_two_stops_both_at_the_same_saved_step(runs, alone, tmp_path):
  workdir = tmp_path / "run"
  with Together(tmp_path, *[command(runs, workdir)] * 2) as together:
    runs.wait_for_step(workdir, 5, together.processes[0])
    together.processes[1].send_signal(signal.SIGTERM)
    assert together.finish() == [Exit.PREEMPTED] * 2, together.outputs
    silent = together.outputs[1]
  lines = runs.lines(workdir)
  assert 5 <= len(lines) < STEPS
  same(lines, alone[: len(lines)])
  assert (workdir / "checkpoints" / str(len(lines)) / "manifest.json").exists()
  assert silent == [
    "Process 1 of 2: SIGTERM: saving after this step, then stopping; a second signal stops at once."
  ]
  codes, outputs = run(tmp_path, 2, command(runs, workdir))
  assert codes == [Exit.DONE] * 2, outputs
  same(runs.lines(workdir), alone)


def test_a_second_signal_ends_a_process_that_waits_for_the_others(runs, tmp_path):
  workdir = tmp_path / "run"
  with Together(tmp_path, *[command(runs, workdir)] * 2) as together:
    runs.wait_for_step(workdir, 2, together.processes[0])
    waiting, stopped = together.processes
    os.killpg(stopped.pid, signal.SIGSTOP)
    waiting.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(20) == 128 + signal.SIGTERM, together.outputs


def test_a_killed_one_of_two_is_a_restart_of_both_from_the_last_good_step(runs, two, tmp_path):
  workdir = tmp_path / "run"
  launch = [
    sys.executable,
    "-m",
    "launch",
    "local",
    "--processes",
    "2",
    *command(runs, workdir)[3:],
  ]
  with open(tmp_path / "output", "w") as output:
    supervisor = subprocess.Popen(
      launch, cwd=ROOT, env=environment(2), stdout=output, stderr=subprocess.STDOUT
    )
  try:
    runs.wait_for_step(workdir, 6, supervisor)
    os.kill(children(supervisor.pid)[1], signal.SIGKILL)
    code = supervisor.wait(PATIENCE)
  finally:
    supervisor.terminate()  # which it passes on
    supervisor.wait(PATIENCE)
  said = (tmp_path / "output").read_text()
  assert code == Exit.DONE, said
  assert "ended with exit code 137 (SIGKILL)." in said
  assert said.count("Continuing after step") == 1
  same(runs.lines(workdir), runs.lines(two[0]))


def children(pid):
  """Process ids, in the order of their start."""
  listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
  return sorted(map(int, listed.split()))


def test_a_folder_in_use_is_told_once_and_ends_all(runs, tmp_path):
  workdir = tmp_path / "run"
  settings = runs.command(workdir).settings
  folder = open_run_folder(str(workdir), settings, allow_change=False, report=print)
  codes, outputs = run(tmp_path, 2, command(runs, workdir))
  folder.close()
  assert codes == [Exit.USAGE] * 2, outputs
  (sentence,), silent = outputs
  assert f"{workdir} is in use by process" in sentence
  assert silent == []


def test_data_that_only_one_host_lacks_end_all_with_its_place(runs, prepared, tmp_path):
  damaged = shutil.copytree(prepared.folder, tmp_path / "data")
  shard = damaged / prepared.train.shards[0].name
  os.truncate(shard, shard.stat().st_size // 2)
  workdir = tmp_path / "run"
  commands = [command(runs, workdir), command(runs, workdir, data__paths=damaged)]
  with Together(tmp_path, *commands) as together:
    assert together.finish() == [Exit.USAGE] * 2, together.outputs
    (sentence,), silent = together.outputs
  assert sentence.startswith(f"Process 1: {shard} ")
  assert silent == []


def test_damaged_records_are_counted_for_all_processes(runs, damaged, tmp_path):
  found = []
  for count in (1, 2):
    workdir = tmp_path / str(count)
    codes, outputs = run(tmp_path, count, command(runs, workdir, data__paths=damaged))
    assert codes == [Exit.DONE] * count, outputs
    found.append(runs.lines(workdir))
  one, both = found
  assert one[-1]["damaged_records"] == both[-1]["damaged_records"] > 0
  same(both, one)


def test_a_folder_that_hosts_do_not_share_is_refused(runs, tmp_path):
  commands = [command(runs, tmp_path / host) for host in ("a", "b")]
  (tmp_path / "b").mkdir()
  with Together(tmp_path, *commands) as together:
    assert together.finish() == [Exit.USAGE] * 2, together.outputs
    (sentence,), silent = together.outputs
  assert sentence == (
    f"Process 1: --workdir {tmp_path / 'b'} is another folder here than on process 0; all must "
    "share it."
  )
  assert silent == []
  assert not list(tmp_path.rglob("shared.*"))


def test_a_row_may_lie_on_the_devices_of_two_processes(runs, tmp_path):
  found = []
  for count in (1, 2):
    workdir = tmp_path / str(count)
    cut = command(
      runs,
      workdir,
      mesh__fsdp=1,
      mesh__context=DEVICES,
      data__batch_rows=2,
      total_steps=4,  # gloo takes long for the many small exchanges of a row
      validation__every_steps=0,
    )
    codes, outputs = run(tmp_path, count, cut)
    assert codes == [Exit.DONE] * count, outputs
    found.append(runs.lines(workdir))
  same(*found)
