"""The script for TPU VMs: valid, in the right order, and its quoting survives two shells."""

import shlex
import subprocess

import pytest

from launch.__main__ import main
from tests.launch.conftest import arguments, without_tools

ONE = ("--zone=us-east5-a", "--topology=v5p:2x2x2", "--config.mesh.fsdp=8")
TWO = (
  "--zone=us-east5-a",
  "--project=p",
  "--spot",
  "--topology=v6e:4x4",
  "--slices=2",
  "--config.mesh.replica=2",
  "--config.mesh.fsdp=16",
)
# Notes its arguments, one call a line, and reads all of its input, as ssh does.
GCLOUD = """#!/usr/bin/env bash
cat >/dev/null
printf '%q ' "$@" >>"$CALLS"
echo >>"$CALLS"
[[ $* == *describe* ]] && echo "$STATE"
exit 0
"""


def script(capsys, *words, **options):
  assert main(["tpu-vm", *arguments("--dry-run", *words, **options)]) == 0
  return capsys.readouterr().out


def calls(text, folder, monkeypatch, state="ACTIVE"):
  """Exit code of the script, and what it asked of gcloud."""
  (folder / "bin").mkdir()
  (folder / "bin" / "gcloud").write_text(GCLOUD)
  (folder / "bin" / "gcloud").chmod(0o755)
  monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
  monkeypatch.setenv("CALLS", str(folder / "calls"))
  monkeypatch.setenv("STATE", state)
  done = subprocess.run(
    ["bash", "-c", text], input="", text=True, capture_output=True, check=False, timeout=60
  )
  return done.returncode, [
    shlex.split(line) for line in (folder / "calls").read_text().splitlines()
  ]


@pytest.mark.parametrize("words", [ONE, TWO], ids=["one slice", "two slices"])
def test_the_script_is_valid(capsys, words):
  subprocess.run(["bash", "-n"], input=script(capsys, *words), text=True, check=True)


def test_machines_then_code_then_run(capsys, tmp_path, monkeypatch):
  code, asked = calls(script(capsys, *TWO), tmp_path, monkeypatch)
  assert code == 0
  place = {"scp": 5}  # of the name; what is copied comes first
  names = [(words[2], words[3], words[place.get(words[3], 4)].rstrip(":")) for words in asked]
  nodes = ["nano-1-0", "nano-1-1"]
  assert names == [
    ("queued-resources", "create", "nano-1"),
    ("queued-resources", "describe", "nano-1"),
    *[("tpu-vm", verb, node) for node in nodes for verb in ("scp", "ssh")],
    *[("tpu-vm", "ssh", node) for node in nodes],
  ]
  create = asked[0]
  assert {"--type=v6e", "--topology=4x4", "--node-count=2", "--spot"} <= set(create)
  assert all({"--zone=us-east5-a", "--project=p"} <= set(words) for words in asked)
  assert all("--worker=all" in words for words in asked[2:])


def test_the_arguments_reach_the_host_as_they_were_typed(capsys, tmp_path, monkeypatch):
  odd = "--config.data.paths=/data/it's here,/data/$HOME"
  _, asked = calls(script(capsys, *ONE, odd), tmp_path, monkeypatch)
  [command] = [w.removeprefix("--command=") for w in asked[-1] if w.startswith("--command=")]
  words = shlex.split(command)
  assert odd in words
  assert "--processes=auto" in words and "--device=v5p" in words


def test_machines_that_do_not_come_end_the_script(capsys, tmp_path, monkeypatch):
  code, asked = calls(script(capsys, *ONE), tmp_path, monkeypatch, state="FAILED")
  assert code == 1
  assert [words[3] for words in asked] == ["create", "describe"]


@pytest.mark.parametrize(
  ("words", "workdir", "sentence"),
  [
    (["--topology=tpu7x:2x2x1"], "/shared/x", "as TPU VMs there are v5p and v6e; use gke."),
    (["--topology=h200:4"], "/shared/x", "as TPU VMs there are v5p and v6e; use slurm or gke."),
    (["--topology=v5p:2x2x2"], "runs/x", "--workdir runs/x would be another folder on each host"),
  ],
)
def test_what_cannot_be_had_is_refused(capsys, words, workdir, sentence):
  mesh = "--config.mesh.fsdp=" + ("4" if "h200:4" in words[0] else "8")
  assert main(["tpu-vm", *arguments("--zone=z", mesh, *words, workdir=workdir)]) == 2
  [line] = capsys.readouterr().err.splitlines()
  assert sentence in line


def test_without_gcloud_a_sentence_says_so(capsys, monkeypatch, tmp_path):
  without_tools(monkeypatch, tmp_path)
  assert main(["tpu-vm", *arguments(*ONE)]) == 2
  assert capsys.readouterr().err.startswith("gcloud is not installed here")
