"""The run folder: one owner at a time, and a configuration that does not change unnoticed."""

import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from configs.schema import CheckpointConfig, Settings
from deepseek_jax.training_config import MeshConfig, OptimConfig
from train.errors import UsageError
from train.lock import RunLock
from train.run_folder import open_run_folder

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = Settings(total_steps=10)


def open_folder(path, settings=SETTINGS, *, allow_change=False):
  """Starts a run in the folder and ends it; returns what was reported."""
  sentences = []
  folder = open_run_folder(str(path), settings, allow_change=allow_change, report=sentences.append)
  folder.remember(settings, sentences.append)
  folder.close()
  return sentences


def test_a_start_that_is_refused_later_leaves_the_configuration_as_it_was(tmp_path):
  path = with_checkpoint(tmp_path)
  before = (path / "config.json").read_text()
  other = changed(optim=OptimConfig(peak_lr=1.0))
  open_run_folder(str(path), other, allow_change=True, report=lambda _: None).close()
  assert (path / "config.json").read_text() == before


def with_checkpoint(path):
  open_folder(path)
  (path / "checkpoints" / "1").mkdir(parents=True)
  (path / "checkpoints" / "1" / "manifest.json").touch()
  return path


def changed(**sections):
  return dataclasses.replace(SETTINGS, **sections)


def test_the_folder_says_what_ran_and_on_what(tmp_path, monkeypatch):
  monkeypatch.setenv("SERVICE_TOKEN", "not-for-files")
  path = tmp_path / "runs" / "a"
  open_folder(path)
  assert json.loads((path / "config.json").read_text())["total_steps"] == 10
  text = (path / "environment.json").read_text()
  found = json.loads(text)
  assert found["versions"]["jax"] and found["devices"]["count"] == 8
  assert found["variables"]["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
  assert "not-for-files" not in text


def test_another_configuration_is_refused_with_every_difference(tmp_path):
  with_checkpoint(tmp_path)
  before = (tmp_path / "config.json").read_text()
  other = changed(total_steps=20, optim=OptimConfig(peak_lr=1.0))
  with pytest.raises(UsageError) as error:
    open_folder(tmp_path, other)
  assert error.value.problems == (
    f"The run in {tmp_path} has another configuration.",
    "optim.peak_lr was 0.00026 and is now 1.0.",
    "total_steps was 10 and is now 20.",
    "Use another --workdir, or give --allow-change to continue with the new values.",
  )
  assert (tmp_path / "config.json").read_text() == before


def test_allow_change_names_what_it_overrides_and_keeps_the_new_values(tmp_path):
  with_checkpoint(tmp_path)
  sentences = open_folder(tmp_path, changed(total_steps=20), allow_change=True)
  assert sentences == [
    "total_steps was 10 and is now 20. The run continues, and is not the same bit for bit."
  ]
  assert open_folder(tmp_path, changed(total_steps=20)) == []


def test_a_rule_of_the_optimizer_that_the_code_changed_is_refused_in_a_sentence(tmp_path):
  with_checkpoint(tmp_path)
  rules = json.loads((tmp_path / "optimizer.json").read_text())
  rules["attn/wo_a"], rules["not_built_any_more"] = "matrix with rows (-1, -3) and columns -2", "?"
  (tmp_path / "optimizer.json").write_text(json.dumps(rules))
  sentence = (
    "The optimizer treated attn/wo_a as matrix with rows (-1, -3) and columns -2 and would now "
    "treat it as matrix with rows -1 and columns -2."
  )
  with pytest.raises(UsageError) as error:
    open_folder(tmp_path)
  assert error.value.problems[1:-1] == (sentence,)
  (reported,) = open_folder(tmp_path, allow_change=True)
  assert reported.startswith(sentence)
  assert open_folder(tmp_path) == []


def test_what_does_not_change_the_losses_may_change_silently(tmp_path):
  with_checkpoint(tmp_path)
  assert open_folder(tmp_path, changed(checkpoint=CheckpointConfig(every_steps=3))) == []


def test_another_mesh_is_accepted_and_said(tmp_path):
  with_checkpoint(tmp_path)
  sentences = open_folder(tmp_path, changed(mesh=MeshConfig(fsdp=8)))
  assert len(sentences) == 1 and sentences[0].startswith("mesh.fsdp was 1 and is now 8.")


def test_before_the_first_checkpoint_the_configuration_may_change(tmp_path):
  open_folder(tmp_path)
  assert open_folder(tmp_path, changed(total_steps=20)) == []


def test_another_version_of_a_library_is_said(tmp_path):
  open_folder(tmp_path)
  path = tmp_path / "environment.json"
  found = json.loads(path.read_text())
  now = found["versions"]["jax"]
  found["versions"]["jax"] = "0.1"
  path.write_text(json.dumps(found))
  assert open_folder(tmp_path) == [f"jax was 0.1 and is now {now}."]


def test_a_path_that_cannot_be_a_folder_is_one_sentence(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(UsageError, match=r"--workdir .*/file/run cannot be used: Not a directory\."):
    open_folder(tmp_path / "file" / "run")


HOLDER = """
import pathlib, sys, time
from train.lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]), report=print)
(pathlib.Path(sys.argv[1]) / "held").touch()
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
  """A living process that has the lock."""
  with open(tmp_path / "output", "w") as output:
    process = subprocess.Popen(
      [sys.executable, "-c", HOLDER, str(tmp_path)],
      cwd=ROOT,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  deadline = time.monotonic() + 20
  while not (tmp_path / "held").exists():
    assert time.monotonic() < deadline, (tmp_path / "output").read_text()
    time.sleep(0.01)
  yield process
  if process.poll() is None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_folder_in_use_is_refused_naming_its_owner(tmp_path, holder):
  with pytest.raises(UsageError) as error:
    open_folder(tmp_path)
  (sentence,) = error.value.problems
  owner = f"process {holder.pid} on {socket.gethostname()} since 2"
  assert sentence.startswith(f"{tmp_path} is in use by {owner}")
  assert not (tmp_path / "config.json").exists()


def test_the_lock_of_a_killed_run_is_taken_over_and_said(tmp_path, holder):
  os.killpg(holder.pid, signal.SIGKILL)
  holder.wait()
  (sentence,) = open_folder(tmp_path)
  assert sentence.startswith(f"Took over {tmp_path} from process {holder.pid} on ")


def test_a_lock_left_on_another_host_is_not_taken_over(tmp_path):
  owner = {"pid": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00"}
  (tmp_path / "run.lock").write_text(json.dumps(owner))
  with pytest.raises(UsageError, match="locked by process 1 on elsewhere since .* delete"):
    open_folder(tmp_path)
  (tmp_path / "run.lock").unlink()
  assert open_folder(tmp_path) == []


def test_a_released_folder_is_free_without_a_word(tmp_path):
  sentences = []
  for _ in range(2):
    lock = RunLock(tmp_path, sentences.append)
    lock.release()
    lock.release()
  assert sentences == []
