"""`inspect` tells what a checkpoint holds without reading an array of it."""

import json
import math
import shutil

import pytest

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.released_config import released_config
from deepseek_jax.checkpoint.released_names import parameters
from train import inspect
from train.errors import Exit, UsageError


def run(folder, *more):
  return inspect.main(["--checkpoint", str(folder), *more])


def written(folder, tmp_path, *more):
  output = tmp_path / "out.json"
  assert run(folder, "--output", str(output), *more) == Exit.DONE
  return json.loads(output.read_text())


def test_arrays_of_a_step_are_those_of_the_model_with_their_sizes(converted, tmp_path):
  contents = written(converted / "run", tmp_path)
  cfg = released_config(json.loads((converted / "case" / "config.json").read_text()))
  wanted = {
    f"{p.item}/{p.path}": {
      "dtype": "float32", "shape": list(p.shape), "bytes": 4 * math.prod(p.shape)
    }
    for p in parameters(cfg)
  }  # fmt: skip
  assert contents["arrays"] == wanted
  assert contents["kind"] == "checkpoint" and contents["folder"].endswith("checkpoints/0")
  assert contents["files"] == manifest.read_manifest(converted / "run" / "checkpoints" / "0")


def test_tensors_of_a_released_checkpoint_are_those_of_its_headers(converted, tmp_path, capsys):
  contents = written(converted / "released", tmp_path)
  assert contents["arrays"]["layers.1.ffn.experts.3.w2.weight"] == {
    "dtype": "I8", "shape": [64, 32], "bytes": 2048
  }  # fmt: skip
  assert contents["bytes"] == sum(entry["bytes"] for entry in contents["arrays"].values())
  assert contents["files"] == manifest.read_manifest(converted / "released")
  (line,) = [n for n in capsys.readouterr().out.splitlines() if "experts.*.w2.weight" in n]
  assert "layers.*.ffn.experts.*.w2.weight" in line and " 20 " in line and "41.0 kB" in line


def test_a_line_for_each_array_on_request(converted, capsys):
  assert run(converted / "released", "--all") == Exit.DONE
  out = capsys.readouterr().out
  assert "layers.4.ffn.experts.0.w1.scale" in out and "*" not in out


@pytest.mark.parametrize("kind", ["run", "released"])
def test_a_flipped_byte_is_found_when_hashes_are_asked_for(converted, tmp_path, capsys, kind):
  folder = shutil.copytree(converted / kind, tmp_path / kind)
  step = folder / "checkpoints" / "0" if kind == "run" else folder
  largest = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[-1] ^= 1
  largest.write_bytes(content)
  assert run(folder) == Exit.DONE
  assert run(folder, "--hashes") == Exit.CHECK_FAILED
  assert f"{largest.relative_to(step)} differs from its SHA-256." in capsys.readouterr().out


def test_a_released_checkpoint_without_hashes_gets_them(converted, tmp_path):
  assert "sha256" not in written(converted / "case", tmp_path)["files"]["weights.safetensors"]
  hashed = written(converted / "case", tmp_path, "--hashes")["files"]
  assert hashed == manifest.hash_files(converted / "case", list(hashed))


def test_a_checkpoint_that_is_not_what_its_configuration_says_is_shown_and_fails(
  converted, tmp_path, capsys
):
  folder = shutil.copytree(converted / "case", tmp_path / "case")
  values = json.loads((folder / "config.json").read_text())
  values["text_config"]["vocab_size"] = 128
  (folder / "config.json").write_text(json.dumps(values))
  assert run(folder) == Exit.CHECK_FAILED
  out = capsys.readouterr().out
  assert "misshapen tensor embed.weight: (64, 64) does not fit (128, 64)" in out
  assert "layers.*.attn.wq_a.weight" in out


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
  with pytest.raises(UsageError) as error:
    run(tmp_path)
  assert error.value.problems == (
    f"--checkpoint {tmp_path} is no run folder with a complete step, and no step.",
  )


@pytest.mark.slow
def test_the_index_of_the_release_comes_from_its_configuration_alone(tmp_path, capsys):
  output = tmp_path / "index.json"
  assert inspect.main(["--config", "configs/flash.py", "--output", str(output)]) == Exit.DONE
  out = capsys.readouterr().out
  assert "763,205,315,794 parameters." in out and "96,085 arrays with 510.3 GB" in out
  contents = json.loads(output.read_text())
  assert len(contents["arrays"]) == 96_085 and contents["bytes"] == 510_286_023_000
  assert sum(file["bytes"] for file in contents["files"].values()) == contents["bytes"]
