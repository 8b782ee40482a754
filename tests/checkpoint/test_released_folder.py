"""A released checkpoint is checked whole from its headers, and parts that we lack are known."""

import json
import pathlib
import shutil

import pytest

from deepseek_jax.checkpoint import CheckpointError
from deepseek_jax.checkpoint.released_folder import INDEX, open_released
from deepseek_jax.checkpoint.released_parts import VISION
from deepseek_jax.checkpoint.safetensors_file import read_headers

CASES = pathlib.Path(__file__).resolve().parents[1] / "reference"


@pytest.fixture
def folder(tmp_path):
  """A case as a released checkpoint."""

  def copy(case):
    for name in ("config.json", "weights.safetensors"):
      shutil.copy(CASES / case / name, tmp_path)
    return tmp_path

  return copy


def test_vision_tensors_of_the_official_code_are_known_and_skipped(folder):
  path = folder("image_span")
  released = open_released(path)
  everything = read_headers(path / "weights.safetensors")
  vision = {name for name in everything if name.startswith(VISION)}
  assert set(released.parts) == {"vision"} and len(vision) == 26
  assert set(released.parts["vision"]) == vision
  assert set(released.tensors) == set(everything) - vision


def test_a_vision_tensor_that_the_configuration_does_not_have_is_named(folder):
  path = folder("image_span")
  values = json.loads((path / "config.json").read_text())
  values["vision_config"]["num_hidden_layers"] = 1
  (path / "config.json").write_text(json.dumps(values))
  with pytest.raises(CheckpointError, match="unused tensor vision.blocks.1.attn.wo.bias"):
    open_released(path)


def test_a_tensor_in_two_files_and_one_in_the_wrong_file_are_named(folder):
  path = folder("minimal_csa2")
  shutil.copy(path / "weights.safetensors", path / "again.safetensors")
  with pytest.raises(CheckpointError, match="is in again.safetensors and in weights.safetensors"):
    open_released(path)
  (path / "again.safetensors").unlink()
  names = read_headers(path / "weights.safetensors")
  (path / "other.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
  weight_map = dict.fromkeys(names, "weights.safetensors") | {"norm.weight": "other.safetensors"}
  (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
  wanted = "the index has tensor norm.weight in other.safetensors, it is in weights.safetensors"
  with pytest.raises(CheckpointError, match=wanted):
    open_released(path)
