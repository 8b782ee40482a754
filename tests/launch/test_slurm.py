"""The batch script: valid, asks for what the mesh needs, and goes back into the queue on 42."""

import subprocess

import pytest

from launch.__main__ import main
from tests.launch.conftest import arguments, without_tools

# Stands for srun: ends as told. Stands for scontrol: notes that it was asked.
SRUN = '#!/bin/sh\nexit "$CODE"\n'
SCONTROL = '#!/bin/sh\necho "$@" >>"$CALLS"\n'


def script(capsys, *words):
  assert main(["slurm", *arguments("--dry-run", *words)]) == 0
  text = capsys.readouterr().out
  subprocess.run(["bash", "-n"], input=text, text=True, check=True)
  return text


@pytest.mark.parametrize(("gpus", "nodes", "each"), [(1, 1, 1), (8, 1, 8), (32, 4, 8)])
def test_it_asks_for_the_machines_of_the_mesh(capsys, gpus, nodes, each):
  text = script(capsys, f"--topology=h200:{gpus}", f"--config.mesh.fsdp={gpus}", "--time=1:00:00")
  head = dict(
    line.removeprefix("#SBATCH ").partition("=")[::2]
    for line in text.splitlines()
    if line.startswith("#SBATCH ")
  )
  assert (head["--nodes"], head["--gpus-per-node"]) == (str(nodes), str(each))
  assert head["--time"] == "1:00:00"
  assert head["--signal"].startswith("TERM@")
  # Options behind the first command would be ignored.
  assert text.index("#SBATCH", text.rindex("#SBATCH")) < text.index("set -uo")
  assert ("--processes=auto" in text) == (nodes > 1)


@pytest.mark.parametrize(("code", "again"), [(0, False), (2, False), (42, True), (43, False)])
def test_only_a_saved_run_goes_back_into_the_queue(capsys, tmp_path, monkeypatch, code, again):
  text = script(capsys, "--topology=h200:1")
  for name, body in (("srun", SRUN), ("scontrol", SCONTROL)):
    (tmp_path / name).write_text(body)
    (tmp_path / name).chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  monkeypatch.setenv("CODE", str(code))
  monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
  monkeypatch.setenv("SLURM_JOB_ID", "17")
  assert subprocess.run(["bash", "-c", text], check=False, timeout=60).returncode == code
  assert (tmp_path / "calls").exists() == again
  if again:
    assert (tmp_path / "calls").read_text() == "requeue 17\n"


def test_tpus_are_refused(capsys):
  assert main(["slurm", *arguments("--topology=v5p:2x2x1", "--config.mesh.fsdp=4")]) == 2
  assert "slurm is for GPUs; use tpu-vm or gke." in capsys.readouterr().err


def test_without_sbatch_a_sentence_says_so(capsys, monkeypatch, tmp_path):
  without_tools(monkeypatch, tmp_path)
  assert main(["slurm", *arguments("--topology=h200:1")]) == 2
  assert capsys.readouterr().err.startswith("sbatch is not installed here")
