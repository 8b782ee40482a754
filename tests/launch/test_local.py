"""A run on this machine: what its processes are told, and that it really runs."""

import os
import subprocess
import sys

import pytest

from launch.__main__ import main
from launch.local import newest_checkpoint, process_variables
from tests.launch.conftest import ROOT, arguments


def dry_run(capsys, *words):
  assert main(["local", *arguments("--dry-run", *words)]) == 0
  text = capsys.readouterr().out
  subprocess.run(["bash", "-n"], input=text, text=True, check=True)
  return text


def test_one_process_is_told_nothing(capsys):
  lines = dry_run(capsys).splitlines()
  assert lines[0] == "# XLA flags for cpu: none"
  assert lines[1].startswith(f"{sys.executable} -m train pretrain --config ")
  assert len(lines) == 2


def test_fine_tuning_takes_the_checkpoint_that_it_starts_from(capsys):
  (_, line) = dry_run(capsys, "--verb=sft", "--init=runs/x").splitlines()
  assert " -m train sft " in line and line.endswith("--init=runs/x")
  assert main(["local", *arguments("--dry-run", "--init=runs/x")]) == 2
  assert "--init is not an argument" in capsys.readouterr().err


def test_processes_are_told_of_one_another(capsys):
  text = dry_run(capsys, "--processes=2", "--config.mesh.fsdp=2")
  addresses = {line.split()[0] for line in text.splitlines() if line.startswith("JAX_")}
  assert len(addresses) == 1
  assert addresses.pop().startswith("JAX_COORDINATOR_ADDRESS=127.0.0.1:")
  assert [f"JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={place} " in text for place in range(3)] == [
    True,
    True,
    False,
  ]


def test_a_host_of_a_pod_leaves_it_to_jax(capsys):
  assert "JAX_NUM_PROCESSES=auto " in dry_run(capsys, "--processes=auto")


def test_gpus_are_shared_out(capsys, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
  text = dry_run(capsys, "--processes=2", "--config.mesh.fsdp=4")
  assert "JAX_LOCAL_DEVICE_IDS=0,1 " in text and "JAX_LOCAL_DEVICE_IDS=2,3 " in text
  assert text.count("--xla_gpu_enable_latency_hiding_scheduler=false") == 3  # once for people
  assert main(["local", *arguments("--processes=3", "--config.mesh.fsdp=3")]) == 2
  assert "--processes 3 cannot share 4 GPUs equally." in capsys.readouterr().err


def test_every_gpu_belongs_to_one_process():
  told = process_variables(4, 8, 1234)
  ids = [i for one in told for i in one["JAX_LOCAL_DEVICE_IDS"].split(",")]
  assert sorted(ids) == sorted(map(str, range(8)))


@pytest.mark.parametrize(
  ("words", "sentence"),
  [
    (["--processes=0"], "--processes must be a positive integer or auto, got 0."),
    (["--processes=2"], "--processes 2 cannot share the 1 devices of the mesh equally."),
    (["--device=v4"], "--device must be one of cpu, gpu, v5p, v6e, tpu7x, got v4."),
  ],
)
def test_what_cannot_run_here_is_refused(capsys, words, sentence):
  assert main(["local", *arguments(*words)]) == 2
  assert capsys.readouterr().err.splitlines() == [sentence]


def test_only_complete_checkpoints_count(tmp_path):
  assert newest_checkpoint(str(tmp_path)) is None
  for step in ("9", "10", "11", "12.bad"):
    (tmp_path / "checkpoints" / step).mkdir(parents=True)
  for step in ("9", "10", "12.bad"):
    (tmp_path / "checkpoints" / step / "manifest.json").touch()
  assert newest_checkpoint(str(tmp_path)) == 10


def test_the_training_program_really_runs_and_its_code_comes_back(tmp_path):
  words = arguments("--config.data.paths=/nowhere", workdir=str(tmp_path / "run"))
  done = subprocess.run(
    [sys.executable, "-m", "launch", "local", *words],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  assert done.returncode == 2
  assert "/nowhere" in done.stderr  # said by the training program
  assert "Process 0 of 1 ended with exit code 2." in done.stderr
