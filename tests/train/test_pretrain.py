"""A run from its first line to its end, and the ways in which it may not go on."""

import dataclasses
import itertools
import json
import shutil

import jax
import numpy as np
import pytest

from data.pipeline import open_pipeline, open_validation, validation_split
from deepseek_jax.checkpoint import restore_step
from deepseek_jax.sharding import make_mesh
from train.errors import Exit, UsageError
from train.evaluate_loss import first_rows
from train.loop import state_items
from train.pretrain import pretrain
from train.programs import build_programs
from train.run_folder import open_run_folder

FIELDS = {"step", "tokens", "loss", "grad_norm", "lr", "mfu"}
FIELDS |= {"tokens_per_second", "step_seconds", "data_wait_seconds"}
VALIDATION, BASELINE = "validation_bits_per_byte", "baseline_bits_per_byte"
STEPS = 16


@pytest.fixture(scope="module")
def finished(runs, one_device, tmp_path_factory):
  """A whole run in this process, and its folder."""
  workdir = tmp_path_factory.mktemp("finished")
  changes = {"total_steps": STEPS, "profile__start_step": 5, "profile__steps": 2}
  command = runs.command(workdir, **changes)
  assert pretrain(command, one_device) is Exit.DONE
  return workdir, command


def test_a_run_learns_and_writes_a_line_for_every_step(finished, runs):
  workdir, command = finished
  found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  assert [line["step"] for line in found] == list(range(1, STEPS + 1))
  assert all(line.keys() >= FIELDS for line in found)
  assert all(line["mfu"] is None for line in found)  # nobody knows the peak of a CPU
  assert found[-1]["loss"] < found[0]["loss"] - 0.3
  assert np.all(np.diff([line["tokens"] for line in found]) > 0)
  assert found[-1]["tokens"] <= STEPS * command.settings.data.batch_rows * 64
  validated = [line["step"] for line in found if VALIDATION in line]
  assert validated == list(range(4, STEPS + 1, 4))
  assert found[-1][VALIDATION] < found[3][VALIDATION]
  assert [line["step"] for line in found if BASELINE in line] == [STEPS]


def test_the_folder_holds_what_the_run_promises(finished):
  workdir, _ = finished
  names = {path.name.partition(".out")[0] for path in workdir.iterdir()}
  assert names >= {"config.json", "environment.json", "metrics.jsonl", "events", "checkpoints"}
  steps = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
  assert steps == [STEPS - 2, STEPS]
  assert list((workdir / "profiles").rglob("*.xplane.pb"))


def test_the_last_validation_is_that_of_the_last_checkpoint(finished, one_device, runs):
  """Loss over the first rows, computed here from the stored weights one row at a time."""
  workdir, command = finished
  settings = command.settings
  model, data = settings.model, dataclasses.replace(settings.data, batch_rows=1)
  mesh = make_mesh(settings.mesh, one_device)
  with jax.set_mesh(mesh):
    programs = build_programs(settings, mesh)
    wanted = state_items(programs.abstract_state)
    items = restore_step(workdir / "checkpoints" / str(STEPS), wanted).items
    held_out = open_validation(data, ratios=model.ratios, engram=model.engram)
    rows = [
      programs.evaluate(items["params"], items["router"], batch.layout)
      for batch in itertools.islice(held_out, settings.validation.rows)
    ]
  nats, targets = np.sum(rows, axis=0)
  wanted_bits = validation_split(data).bits_per_byte(nats / targets)
  assert runs.lines(workdir)[-1][VALIDATION] == pytest.approx(wanted_bits, rel=1e-4)


def test_a_second_call_of_a_finished_run_says_so_and_compares_again(finished, one_device, capsys):
  workdir, command = finished
  before = (workdir / "metrics.jsonl").read_bytes()
  assert pretrain(command, one_device) is Exit.DONE
  said = capsys.readouterr().out
  assert f"The run in {workdir} is done." in said
  assert f"{STEPS} steps, " in said and "bits per byte; interpolated Kneser-Ney bigram" in said
  assert "Compiled" not in said
  assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_more_steps_are_another_configuration_until_they_are_allowed(finished, runs, one_device):
  workdir, _ = finished
  command = runs.command(workdir, total_steps=STEPS + 1)
  with pytest.raises(UsageError, match=f"total_steps was {STEPS} and is now {STEPS + 1}."):
    pretrain(command, one_device)
  copied = shutil.copytree(workdir, workdir.with_name("allowed"))
  allowed = command._replace(workdir=str(copied), allow_change=True)
  assert pretrain(allowed, one_device) is Exit.DONE
  assert [line["step"] for line in runs.lines(copied)] == list(range(1, STEPS + 2))


def test_only_the_first_rows_are_validated_whatever_the_hosts(runs, tmp_path):
  cfg = runs.command(tmp_path).settings.data
  open_host = lambda host: open_validation(cfg, ratios=(), engram=None, host=host, hosts=2)
  whole = list(first_rows(open_validation(cfg, ratios=(), engram=None), 6))
  parts = [list(first_rows(open_host(host), 6, host=host, hosts=2)) for host in (0, 1)]
  weights_BT = np.concatenate([batch.layout.weights for batch in whole])
  assert weights_BT.any(axis=1).tolist() == [True] * 6 + [False] * 2
  assert len(parts[0]) == len(parts[1]) == len(whole) == 2
  shared = sum(batch.layout.weights.sum() for part in parts for batch in part)
  assert shared == weights_BT.sum()


def test_wrong_usage_is_told_before_anything_is_compiled(runs, tmp_path):
  code, output = runs.finish(
    tmp_path / "run", "--alow-change", total_stepps=3, data__slots=63, mesh__fsdp=2
  )
  assert code == 2
  assert output.splitlines() == [
    "--alow-change is not an argument; the nearest is --allow-change.",
    "total_stepps is not a configuration key; the nearest is total_steps.",
  ]
  code, output = runs.finish(tmp_path / "run", data__slots=63, mesh__fsdp=2)
  assert code == 2
  assert "multiply to 2, but the number of devices is 1." in output
  assert "data.slots is 63" in output
  assert "Compiled" not in output and "Traceback" not in output


def test_a_second_run_on_the_same_folder_is_refused(runs, tmp_path):
  workdir = tmp_path / "run"
  settings = runs.command(workdir).settings
  folder = open_run_folder(str(workdir), settings, allow_change=False, report=print)
  code, output = runs.finish(workdir)
  folder.close()
  assert code == 2
  assert f"{workdir} is in use by process" in output and "Traceback" not in output


@pytest.mark.slow
def test_eight_devices_train_like_one(finished, runs, tmp_path):
  found = {}
  for devices in (1, 8):
    changes = {"mesh__fsdp": devices, "data__batch_rows": 8, "total_steps": 4}
    changes["model__numerics__compute_dtype"] = "float32"
    workdir = tmp_path / str(devices)
    command = runs.command(workdir, devices=devices, **changes)
    assert pretrain(command, jax.devices()[:devices]) is Exit.DONE
    found[devices] = runs.lines(workdir)
  for one, eight in zip(found[1], found[8], strict=True):
    assert one["tokens"] == eight["tokens"]
    assert one["loss"] == pytest.approx(eight["loss"], rel=1e-4)
    assert one["grad_norm"] == pytest.approx(eight["grad_norm"], rel=1e-2)


@pytest.mark.slow
def test_steps_that_are_not_finite_stop_the_run_and_name_their_records(runs, tmp_path):
  workdir = tmp_path / "run"
  code, output = runs.finish(workdir, optim__peak_lr=1e30, max_skipped_steps=2)
  assert code == Exit.STOPPED, output
  assert "Traceback" not in output
  *_, first, second = runs.lines(workdir)
  assert [line["skipped"] for line in (first, second)] == [1, 2]
  assert first["loss"] is None or first["grad_norm"] is None
  cfg = runs.command(workdir).settings.data
  batches = itertools.islice(open_pipeline(cfg, ratios=(), engram=None), second["step"])
  for step, batch in list(enumerate(batches, 1))[-2:]:
    assert f"step {step}: {', '.join(batch.records)}" in output.splitlines()[-1]


@pytest.mark.slow
def test_too_many_damaged_records_stop_the_run_after_the_lines_of_good_steps(
  runs, damaged, tmp_path
):
  changes = {"data__paths": damaged, "data__max_damaged_records": 0, "total_steps": 100}
  workdir = tmp_path / "run"
  code, output = runs.finish(workdir, **changes)
  assert code == Exit.STOPPED, output
  assert "Traceback" not in output
  assert "more than data.max_damaged_records (0): " in output.splitlines()[-1]
  steps = [line["step"] for line in runs.lines(workdir)]
  assert steps and steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_save_that_fails_ends_the_run_at_once(runs, tmp_path):
  no_large_files = ("sh", "-c", 'ulimit -f 256; exec "$@"', "sh")  # no file above 128 KiB
  workdir = tmp_path / "run"
  changes = {"checkpoint__every_steps": 3, "total_steps": 1000, "validation__every_steps": 0}
  code, output = runs.finish(workdir, inside=no_large_files, **changes)
  assert code == Exit.CHECK_FAILED, output
  assert output.splitlines()[-1].startswith("Checkpoint 3 could not be saved in ")
  assert len(runs.lines(workdir)) < 100
