"""Vision and drafter, which our model lacks, go from a release into an export, or are left out."""

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from deepseek_jax.checkpoint import CheckpointError, manifest
from deepseek_jax.checkpoint.released import decoded_rows
from deepseek_jax.checkpoint.released_carried import carried_tensors
from deepseek_jax.checkpoint.released_config import released_config
from deepseek_jax.checkpoint.released_folder import open_released
from deepseek_jax.checkpoint.released_index import index
from deepseek_jax.checkpoint.released_parts import NOT_BACKBONE, part_tensors
from deepseek_jax.checkpoint.safetensors_file import (
  DTYPES,
  read_headers,
  read_safetensors,
  write_safetensors,
)
from train import convert, origin
from train.errors import Exit, UsageError
from train.run_folder import RunFolder
from train.settings import CommandLine
from train.stored_step import find_step

CASE = pathlib.Path(__file__).resolve().parents[1] / "reference" / "quantized_model"
VISION = {
  "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "patch_size": 2,
  "downsample_ratio": 3, "max_image_tokens": 24,
}  # fmt: skip
DRAFTER = {
  "num_nextn_predict_layers": 1, "dspark_n_routed_experts": 2, "dspark_target_layer_ids": [3, 4],
  "dspark_markov_rank": 8, "dspark_block_size": 5,
}  # fmt: skip
COUNTS = {"vision": 18, "drafter": 49}


def drawn(random, header):
  """Any bytes that are numbers."""
  if header.dtype in ("BF16", "F32"):
    return random.normal(size=header.shape).astype(DTYPES[header.dtype])
  codes = random.integers(0, 0x7E, header.shape, np.uint8)
  return codes.view(DTYPES[header.dtype])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The quantized case with random tensors of a small vision tower and a drafter."""
  folder, random = tmp_path_factory.mktemp("whole") / "release", np.random.default_rng(0)
  folder.mkdir()
  values = json.loads((CASE / "config.json").read_text())
  values["vision_config"] = VISION
  values["image_token_id"] = 60
  values["text_config"] |= DRAFTER
  layers = values["text_config"]["num_hidden_layers"]
  values["text_config"]["compress_ratios"] = values["text_config"]["compress_ratios"][:layers] + [0]
  (folder / "config.json").write_text(json.dumps(values))
  entries = {name: at.header for name, at in read_headers(CASE / "weights.safetensors").items()}
  arrays = read_safetensors(CASE / "weights.safetensors")
  for name, header in index(part_tensors(values, released_config(values))).items():
    entries[name], arrays[name] = header, drawn(random, header)
  write_safetensors(folder / "weights.safetensors", entries, arrays.items())
  return folder


@pytest.fixture(scope="module")
def imported(whole):
  """What the release becomes; "out" is what was said."""
  run = whole.with_name("run")
  into = ["--checkpoint", str(whole), "--output", str(run), "--format", "checkpoint"]
  assert convert.main(into) == Exit.DONE
  return run


def export(source, output, *more, dtype="released"):
  words = ["--checkpoint", str(source), "--output", str(output), "--format", "released"]
  return convert.main([*words, "--dtype", dtype, *map(str, more)])


def refusal(*arguments, **options):
  with pytest.raises(UsageError) as error:
    export(*arguments, **options)
  (problem,) = error.value.problems
  return problem


def test_a_release_comes_back_with_every_tensor_and_the_same_bytes_of_those_we_lack(
  whole, imported, tmp_path, capsys
):
  assert export(imported, tmp_path / "out", "--carry-from", whole) == Exit.DONE
  assert f"are those of {whole}." in capsys.readouterr().out
  before, after = open_released(whole), open_released(tmp_path / "out")
  assert {part: set(tensors) for part, tensors in after.parts.items()} == {
    part: set(tensors) for part, tensors in before.parts.items()
  }
  assert set(after.tensors) == set(before.tensors) and after.cfg == before.cfg
  assert {part: len(tensors) for part, tensors in after.parts.items()} == COUNTS
  for part, tensors in before.parts.items():
    for name, stored in tensors.items():
      found = after.parts[part][name]
      assert found.header == stored.header, name
      assert found.whole().tobytes() == stored.whole().tobytes(), name
  assert manifest.verify_step(tmp_path / "out") == []


def test_the_configuration_of_an_export_keeps_what_the_release_says_of_them(
  whole, imported, tmp_path
):
  assert export(imported, tmp_path / "out", "--carry-from", whole) == Exit.DONE
  before, after = (json.loads((f / "config.json").read_text()) for f in (whole, tmp_path / "out"))
  assert after["vision_config"] == VISION and after["image_token_id"] == 60
  text = after["text_config"]
  assert {name: text[name] for name in DRAFTER} == DRAFTER
  assert text["compress_ratios"] == before["text_config"]["compress_ratios"]


def test_in_bfloat16_they_are_decoded(whole, imported, tmp_path):
  assert export(imported, tmp_path / "out", "--carry-from", whole, dtype="bfloat16") == Exit.DONE
  before, after = open_released(whole), open_released(tmp_path / "out")
  assert "quantization_config" not in after.values
  for tensor in part_tensors(before.values, before.cfg):
    files = before.parts["drafter" if tensor.name.startswith("mtp.") else "vision"]
    (found,) = (part[tensor.name] for part in after.parts.values() if tensor.name in part)
    assert found.header.dtype == ("F32" if tensor.stored == "f32" else "BF16")
    wanted = decoded_rows(files, tensor, 0, tensor.shape[0])
    if found.header.dtype == "BF16":
      wanted = wanted.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.whole(), wanted, tensor.name)


def test_they_are_left_out_on_request_alone(whole, imported, tmp_path, capsys):
  assert refusal(imported, tmp_path / "out") == (
    f"{imported / 'checkpoints' / '0'} began with a release whose 18 tensors of vision and 49 "
    "tensors of drafter it does not hold; name that release with --carry-from, or leave them out "
    "with --carry-from none."
  )
  assert export(imported, tmp_path / "out", "--carry-from", "none") == Exit.DONE
  assert "The export has no tensors of vision and drafter." in capsys.readouterr().out
  names = set(read_headers(next((tmp_path / "out").glob("*.safetensors"))))
  assert names == set(open_released(whole).tensors)
  assert not any(name.startswith(NOT_BACKBONE) for name in names)


def test_a_run_that_starts_from_an_import_still_needs_them(imported, tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  begun = origin.Origin("sft", str(imported), find_step("--init", str(imported)))
  origin.remember(begun, RunFolder(folder, lock=object()))
  assert origin.parts_behind(folder) == COUNTS


def test_no_run_begins_anew_in_the_folder_of_an_import(imported):
  settings = find_step("--init", str(imported)).settings
  with pytest.raises(UsageError) as error:
    origin.find_origin(CommandLine(settings, str(imported)), RunFolder(imported, lock=None), 0)
  assert error.value.problems == (
    f"{imported} is what convert made; start from it with sft and another --workdir.",
  )


def test_a_release_that_lacks_a_part_is_refused(imported, converted, tmp_path):
  case = converted / "case"
  assert refusal(imported, tmp_path / "out", "--carry-from", case) == (
    f"--carry-from {case} has none and not 18 tensors of vision and 49 tensors of drafter."
  )
  nowhere = f"--carry-from {tmp_path} is no released checkpoint."
  assert refusal(imported, tmp_path / "out", "--carry-from", tmp_path) == nowhere
  assert not (tmp_path / "out").exists()


def test_parts_that_do_not_fit_the_model_are_named(whole):
  released = open_released(whole)
  other = dataclasses.replace(released.cfg, vocab=128, compress_ratios=(0, 1, 1, 1))
  with pytest.raises(CheckpointError) as error:
    carried_tensors(released, other)
  assert "misshapen tensor mtp.0.markov_head.embed.weight: (64, 8) does not fit (128, 8)" in str(
    error.value
  )
  assert "the drafter reads layer 4 of 4" in str(error.value)
