"""Two checkpoints, or one and stored traces, layer by layer on the same tokens."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.safetensors_file import (
  read_headers,
  read_safetensors,
  write_safetensors,
)
from train import verify
from train.errors import Exit, UsageError

REFERENCE = pathlib.Path(__file__).resolve().parents[1] / "reference"
CASE = REFERENCE / "quantized_model"


def run(checkpoint, against, *more):
  words = ["--checkpoint", str(checkpoint), "--against", str(against), "--devices=1", *more]
  return verify.main(words)


def changed(folder, target, change):
  """A copy of a released checkpoint with other values in some of its tensors."""
  shutil.copytree(folder, target)
  (target / manifest.NAME).unlink()
  (path,) = target.glob("*.safetensors")
  entries = {name: stored.header for name, stored in read_headers(path).items()}
  arrays = read_safetensors(path)
  change(arrays)
  write_safetensors(path, entries, arrays.items())
  return target


@pytest.mark.parametrize("numerics", ["fp32_actqat", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_converted_checkpoint_has_the_traces_of_the_reference(converted, tmp_path, numerics):
  """With activation quantization, as the release is served, and without any."""
  output = tmp_path / "out.json"
  words = ("--numerics", numerics, "--output", str(output))
  assert run(converted / "run", CASE, *words) == Exit.DONE
  traces = json.loads(output.read_text())["cases"]["quantized_model"]
  assert traces["logits"]["mean_kl"] < 1e-9 and traces["logits"]["top1"] == 1
  assert traces["layers.4.streams"]["relative"] <= 2e-5
  assert traces["layers.3.indexer.topk"]["identical"]


@pytest.mark.slow
def test_a_checkpoint_equals_what_it_was_made_from(converted, tmp_path, capsys):
  output = tmp_path / "out.json"
  assert run(converted / "run", converted / "case", "--output", str(output)) == Exit.DONE
  out = capsys.readouterr().out
  assert "Compared on 2 rows of 256 random tokens." in out and ": close enough." in out
  traces = json.loads(output.read_text())["cases"]["checkpoint"]
  floats = {name: trace["max_abs"] for name, trace in traces.items() if "max_abs" in trace}
  assert len(floats) > 50 and set(floats.values()) == {0.0}


def test_a_changed_layer_shows_there_and_fails(converted, tmp_path, capsys):
  def change(arrays):
    gain = arrays["layers.2.ffn_norm.weight"]
    arrays["layers.2.ffn_norm.weight"] = (gain.astype(np.float32) * -3).astype(gain.dtype)

  other = changed(converted / "released", tmp_path / "other", change)
  output = tmp_path / "out.json"
  assert run(other, converted / "case", "--output", str(output)) == Exit.CHECK_FAILED
  assert "NOT close enough" in capsys.readouterr().out
  traces = json.loads(output.read_text())["cases"]["checkpoint"]
  assert traces["layers.1.streams"]["max_abs"] == 0 == traces["layers.2.attn.out"]["max_abs"]
  assert traces["layers.2.streams"]["relative"] > 0.01
  assert traces["logits"]["mean_kl"] > 1e-3


def test_models_that_differ_are_refused_with_what_differs(converted):
  with pytest.raises(UsageError) as error:
    run(converted / "run", REFERENCE / "engram")
  problems = " ".join(error.value.problems)
  assert "model.vocab is 64 in --checkpoint" in problems or "model.dim is 64" in problems


def test_numerics_without_traces_are_refused(converted):
  with pytest.raises(UsageError) as error:
    run(converted / "run", REFERENCE / "engram", "--numerics", "fp32_actqat")
  assert error.value.problems == (
    f"--against {REFERENCE / 'engram'} has no outputs for --numerics fp32_actqat.",
  )


@pytest.mark.slow
def test_devices_that_share_the_parameters_find_the_same(converted, tmp_path):
  def change(arrays):
    gain = arrays["layers.2.ffn_norm.weight"]
    arrays["layers.2.ffn_norm.weight"] = (gain.astype(np.float32) * 1.25).astype(gain.dtype)

  other = changed(converted / "released", tmp_path / "other", change)
  found = []
  for devices in (1, 8):
    output = tmp_path / f"{devices}.json"
    run(other, converted / "run", f"--devices={devices}", "--output", str(output))
    found.append(json.loads(output.read_text())["cases"]["checkpoint"])
  alone, shared = found
  assert shared["layers.1.streams"]["max_abs"] == 0 < shared["layers.2.streams"]["max_abs"]
  for name in ("layers.2.ffn_in", "layers.2.streams"):  # other rows, the same kind of tokens
    assert shared[name]["relative"] == pytest.approx(alone[name]["relative"], rel=0.5)
