"""Every problem of a command line is told at once, in sentences, with exit code 2."""

import pytest

from launch import xla_flags
from launch.__main__ import LAUNCHERS, main
from launch.machines import parse_machines
from tests.launch.conftest import arguments


def refusal(capsys, *words):
  assert main(words) == 2
  output = capsys.readouterr()
  assert output.out == ""
  assert "Traceback" not in output.err
  return output.err.splitlines()


def test_every_problem_is_told_at_once(capsys):
  lines = refusal(
    capsys,
    "tpu-vm",
    "--topology=v5p:8x8",
    "--slices=0",
    "--nme=x",
    "--dryrun",
    "--verb=train",
    "--config.modl.dim=3",
    "--workdir=runs/x",
  )
  assert lines == [
    "--zone is missing: zone of the TPUs.",
    "--nme is not an argument; the nearest is --name.",
    "--dryrun is not an argument; the nearest is --dry-run.",
    "--config is missing.",
    "--verb must be one of pretrain, sft, distill, rl, dspark, got train.",
    "modl.dim is not a configuration key; the nearest is model.dim.",
    "--slices must be a positive integer, got 0.",
    "--topology v5p:8x8: v5p has 3 dimensions, not 2; it is written as in v5p:8x8x8, v6e:16x16, "
    "tpu7x:4x4x4 or h200:8.",
  ]


def test_an_unknown_launcher_gets_the_nearest(capsys):
  assert refusal(capsys, "slrum") == ["slrum is not a launcher; the nearest is slurm."]


def test_a_mesh_that_does_not_fill_the_machines_is_told_what_would(capsys):
  words = arguments("--topology=h200:8", "--config.mesh.expert=2")
  assert refusal(capsys, "slurm", *words) == [
    "The axes of mesh (replica 1 * fsdp 1 * expert 2 * context 1 * tensor 1) multiply to 2, but "
    "the number of devices is 8. --config.mesh.fsdp=4 would fit."
  ]


def test_only_replicas_lie_in_several_slices(capsys):
  words = arguments("--topology=v5p:2x2x1", "--slices=2", "--zone=z", "--config.mesh.fsdp=8")
  assert refusal(capsys, "tpu-vm", *words) == [
    "mesh.replica is 1, which 2 slices do not divide; only replicas may lie in several slices. "
    "--config.mesh.fsdp=4 --config.mesh.replica=2 would fit."
  ]


@pytest.mark.parametrize("workdir", ["/shared/2nd", "/shared/" + "x" * 41, "/shared/---"])
def test_a_folder_whose_name_is_no_name_for_a_job_is_told_so(capsys, workdir):
  words = arguments("--topology=h200:1", workdir=workdir)
  [line] = refusal(capsys, "slurm", *words)
  assert line.startswith("--name must be at most 40 lower-case letters")
  assert main(["slurm", *words, "--name=good-name", "--dry-run"]) == 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_help_names_every_argument(capsys, launcher):
  assert main([launcher, "--help"]) == 0
  text = capsys.readouterr().out
  assert all(name in text for name in ("--dry-run", "--verb", "--config", "--workdir"))


@pytest.mark.parametrize(
  ("text", "hosts", "devices"),
  [
    ("v5p:8x8x8", 128, 512),
    ("v5p:2x2x1", 1, 4),
    ("v6e:16x16", 64, 256),
    ("v6e:1x1", 1, 1),
    ("tpu7x:2x2x2", 2, 16),
    ("h200:2", 1, 2),
    ("h200:64", 8, 64),
  ],
)
def test_machines_are_counted(text, hosts, devices):
  machines = parse_machines(text)
  assert (machines.hosts, machines.devices, str(machines)) == (hosts, devices, text)
  assert machines.kind.flags in xla_flags.TABLE


@pytest.mark.parametrize(
  "text", ["v5p", "v4:2x2x2", "v5p:0x1x1", "h200:12", "v6e:3x5", "v5p:axbxc"]
)
def test_machines_that_do_not_exist_are_refused(text):
  with pytest.raises(ValueError, match="--topology"):
    parse_machines(text)
