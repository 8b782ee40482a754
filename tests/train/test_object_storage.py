"""Whole runs whose folder and data are in an S3 store: the same lines as a run on local files."""

import json
import os
import signal
import time

import jax
import pytest

from configs.schema import Settings
from deepseek_jax.checkpoint import manifest, verify_step
from deepseek_jax.storage_path import cache_folder, storage_path, upload_tree
from tests.train.several import MODEL
from train.__main__ import main
from train.errors import Exit, UsageError
from train.run_folder import open_run_folder

STEPS = MODEL | {"total_steps": 16, "checkpoint__every_steps": 4, "validation__every_steps": 0}
LONG = STEPS | {"total_steps": 100_000}


@pytest.fixture
def on_s3(runs, s3):
  """Keywords of a run whose data are in the store."""
  upload_tree(runs.data, storage_path(f"{s3}/data"))
  return {"data__paths": f"{s3}/data"}


def wait_for_checkpoint(runs, workdir, step, process):
  deadline = time.monotonic() + 300
  while max(manifest.complete_steps(workdir / "checkpoints"), default=0) < step:
    assert process.poll() is None, runs.output(workdir)
    assert time.monotonic() < deadline
    time.sleep(0.02)


def kill(process):
  os.killpg(process.pid, signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_lines_of_a_local_run(runs, s3, on_s3, tmp_path):
  code, output = runs.finish(tmp_path / "run", **STEPS)
  assert code == Exit.DONE, output
  workdir = storage_path(f"{s3}/runs/a")
  for step in (4, 8):
    process = runs.start(workdir, **STEPS, **on_s3)
    wait_for_checkpoint(runs, workdir, step, process)
    time.sleep(0.05 * step)
    kill(process)
  code, output = runs.finish(workdir, **STEPS, **on_s3)
  assert code == Exit.DONE, output
  assert "Took over" in output and "Continuing after step" in output
  assert runs.lines(workdir) == runs.lines(tmp_path / "run")
  names = {name.partition("/")[0] for name in workdir.names_below()}
  assert names >= {"config.json", "environment.json", "checkpoints"}
  assert "run.lock" not in names
  assert json.loads((workdir / "config.json").read_text())["total_steps"] == 16
  steps = manifest.complete_steps(workdir / "checkpoints")
  assert steps[-1] == 16 and not any(verify_step(workdir / "checkpoints" / str(s)) for s in steps)


@pytest.fixture
def two(runs, s3, on_s3):
  """Two runs that were started together on one folder, without end."""
  processes = [runs.start(storage_path(f"{s3}/runs/a"), **LONG, **on_s3) for _ in range(2)]
  yield processes
  for process in processes:
    if process.poll() is None:
      kill(process)


@pytest.mark.slow
def test_of_two_runs_on_one_folder_exactly_one_trains(runs, s3, two):
  workdir, deadline = storage_path(f"{s3}/runs/a"), time.monotonic() + 300
  while all(process.poll() is None for process in two):
    assert time.monotonic() < deadline
    time.sleep(0.1)
  loser, winner = sorted(two, key=lambda process: process.poll() is None)
  assert loser.returncode == Exit.USAGE, runs.output(workdir)
  assert f"{workdir} is in use by process {winner.pid} on " in runs.output(workdir)
  wait_for_checkpoint(runs, workdir, 4, winner)
  winner.send_signal(signal.SIGTERM)
  assert winner.wait(120) == Exit.PREEMPTED
  steps = [line["step"] for line in runs.lines(workdir)]
  assert steps == list(range(1, len(steps) + 1))
  assert manifest.complete_steps(workdir / "checkpoints")[-1] == len(steps)


def test_a_remote_folder_is_bound_to_its_configuration_once_it_has_a_checkpoint(s3):
  def start(settings):
    folder = open_run_folder(f"{s3}/runs/a", settings, allow_change=False, report=print)
    try:
      folder.remember(settings, print)
    finally:
      folder.close()

  start(Settings(total_steps=10))
  start(Settings(total_steps=20))
  storage_path(f"{s3}/runs/a/checkpoints/1/manifest.json").write_bytes(b"{}")
  with pytest.raises(UsageError, match="total_steps was 20 and is now 30"):
    start(Settings(total_steps=30))
  start(Settings(total_steps=20))
  assert storage_path(f"{s3}/runs/a").names_below() == [
    "checkpoints/1/manifest.json",
    "config.json",
    "environment.json",
    "optimizer.json",
  ]


@pytest.fixture
def without_a_named_cache():
  before = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  yield
  jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("without_a_named_cache")
def test_compiled_programs_of_a_remote_run_stay_in_the_cache_folder(s3):
  said = []
  folder = open_run_folder(f"{s3}/runs/a", Settings(), allow_change=False, report=said.append)
  folder.close()
  assert folder.compilation_cache == cache_folder() / "compilation_cache"
  assert said == [f"Compiled programs are kept on this machine, in {folder.compilation_cache}."]


def test_a_store_that_cannot_be_reached_is_one_sentence_at_the_start(runs, s3, monkeypatch, capsys):
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  assert main(["pretrain", *runs.argv(f"{s3}/runs/a", mesh__fsdp=8, data__batch_rows=8)]) == 2
  assert capsys.readouterr().err == (
    f"--workdir {s3}/runs/a cannot be used: http://127.0.0.1:9 cannot be reached (see "
    "AWS_ENDPOINT_URL and the network).\n"
  )


def test_data_in_a_bucket_that_is_not_there_are_one_sentence(runs, s3, capsys, tmp_path):
  argv = runs.argv(
    tmp_path, data__paths="s3://no-such-bucket/data", mesh__fsdp=8, data__batch_rows=8
  )
  assert main(["pretrain", *argv]) == 2
  (sentence,) = capsys.readouterr().err.splitlines()
  assert sentence.startswith("data.paths names 's3://no-such-bucket/data', where no finished")


@pytest.mark.parametrize("workdir", ["s3://bucket", "ftp://host/runs/a"])
def test_a_url_that_is_no_folder_is_refused(runs, workdir, capsys):
  assert main(["pretrain", *runs.argv(workdir, mesh__fsdp=8, data__batch_rows=8)]) == 2
  assert "--workdir must be a local folder or one of s3://BUCKET/FOLDER" in capsys.readouterr().err
