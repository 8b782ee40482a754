"""Damaged files, wrong indexes, contradictions, full disks, kills: one sentence, nothing lost."""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorstore as ts

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.released_folder import INDEX
from deepseek_jax.checkpoint.stored_arrays import open_items
from tests.full_disk import no_file_above
from train import convert
from train.errors import Exit, UsageError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(source, output, *more):
  return convert.main(["--checkpoint", str(source), "--output", str(output), *more])


TO_CHECKPOINT = ("--format", "checkpoint")
TO_RELEASED = ("--format", "released", "--dtype", "released")


@pytest.fixture
def released(converted, tmp_path):
  """A copy that a test may damage."""
  return shutil.copytree(converted / "released", tmp_path / "released")


def fingerprint(folder):
  return {
    str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in folder.rglob("*")
    if path.is_file()
  }


def edit_json(path, change):
  values = json.loads(path.read_text())
  change(values)
  path.write_text(json.dumps(values))


def without_hashes(folder):
  (folder / manifest.NAME).unlink()


def shard(folder):
  (path,) = folder.glob("model-*.safetensors")
  return path


def truncate(folder):
  content = shard(folder).read_bytes()
  shard(folder).write_bytes(content[: len(content) // 2])


def flip(folder):
  content = bytearray(shard(folder).read_bytes())
  content[-7] ^= 1
  shard(folder).write_bytes(content)


def rename_in_index(folder):
  def change(index):
    index["weight_map"]["nothing.weight"] = index["weight_map"].pop("norm.weight")

  edit_json(folder / INDEX, change)


def text_config(**changes):
  return lambda folder: edit_json(
    folder / "config.json", lambda values: values["text_config"].update(changes)
  )


def unknown_dtype(folder):
  content = shard(folder).read_bytes()
  shard(folder).write_bytes(content.replace(b'"F8_E4M3"', b'"F8_E5M2"'))


def scale_that_is_no_number(folder):
  content = bytearray(shard(folder).read_bytes())
  length = int.from_bytes(content[:8], "little")
  entry = json.loads(content[8 : 8 + length])["layers.0.attn.wq_a.scale"]
  content[8 + length + entry["data_offsets"][0]] = 255
  shard(folder).write_bytes(content)


DAMAGES = {
  "truncated": (truncate, "is not a readable safetensors file: it has"),
  "index": (rename_in_index, "the index has tensor nothing.weight, no file has it; model-00001-of"),
  "no index": (lambda f: (f / INDEX).write_text("{}"), "is no index: it has no weight_map"),
  "lost file": (lambda f: shard(f).unlink(), "lacks model-00001-of-00001.safetensors, which"),
  "shapes": (text_config(hidden_size=96), "misshapen tensor embed.weight: (64, 64) does not fit"),
  "layers": (text_config(index_source_layer_ids=[1, 3]), "unused tensor layers.4.attn.indexer.w"),
  "rows": (text_config(engram_num_embeddings=[250]), "engram.embed.weight: (252, 32) does not fit"),
  "primes": (text_config(engram_vocab_size=3), "engram.table_rows is (252,), but"),
  "key": (lambda f: edit_json(f / "config.json", lambda v: v["text_config"].pop("hc_mult")),
          "config.json lacks the key 'hc_mult'"),
  "dtype": (unknown_dtype, "has dtype F8_E5M2, known are ['BF16', 'BOOL', 'F32', 'F8_E4M3'"),
  "no json": (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_that_names_the_fault(
  name, released, tmp_path
):
  damage, sentence = DAMAGES[name]
  without_hashes(released)
  damage(released)
  with pytest.raises(UsageError) as error:
    run(released, tmp_path / "run", *TO_CHECKPOINT)
  (problem,) = error.value.problems
  assert sentence in problem and "\n" not in problem
  assert [path.name for path in tmp_path.iterdir()] == ["released"]


def test_a_flipped_byte_is_found_by_the_hashes_beside_the_files(released, tmp_path):
  flip(released)
  with pytest.raises(UsageError) as error:
    run(released, tmp_path / "run", *TO_CHECKPOINT)
  assert error.value.problems == (
    f"{released} cannot be used: model-00001-of-00001.safetensors differs from its SHA-256.",
  )


def test_what_only_reading_shows_ends_with_1_and_leaves_nothing(released, tmp_path, capsys):
  without_hashes(released)
  scale_that_is_no_number(released)
  assert run(released, tmp_path / "run", *TO_CHECKPOINT) == Exit.CHECK_FAILED
  error = capsys.readouterr().err
  assert "layers.0.attn.wq_a.weight in " in error and "a scale is not a number." in error
  assert [path.name for path in tmp_path.iterdir()] == ["released"]


def test_a_configuration_of_ours_that_contradicts_the_arrays_is_refused(converted, tmp_path):
  folder = shutil.copytree(converted / "run", tmp_path / "run")
  edit_json(folder / "config.json", lambda values: values["model"].update(vocab=96))
  with pytest.raises(UsageError) as error:
    run(folder, tmp_path / "made", *TO_RELEASED)
  (problem,) = error.value.problems
  assert "array params/embed is [64, 64] instead of [96, 64]" in problem
  assert not list(tmp_path.glob("made*"))


@pytest.mark.parametrize(
  ("source", "format"), [("run", TO_RELEASED), ("released", TO_CHECKPOINT)], ids=["out", "in"]
)
def test_a_disk_that_fills_up_leaves_nothing_and_destroys_nothing(
  converted, tmp_path, capfd, source, format
):
  before = fingerprint(converted)
  with no_file_above(1 << 15):
    assert run(converted / source, tmp_path / "made", *format) == Exit.CHECK_FAILED
  error = capfd.readouterr().err
  assert "File too large" in error and "Traceback" not in error and error.count("\n") == 1
  assert list(tmp_path.iterdir()) == []
  assert fingerprint(converted) == before


@pytest.mark.parametrize(
  ("source", "format"), [("run", TO_RELEASED), ("released", TO_CHECKPOINT)], ids=["out", "in"]
)
def test_where_nothing_can_be_written_it_is_said_before_anything_is_read(
  converted, tmp_path, source, format
):
  (tmp_path / "file").touch()
  for output in (tmp_path / "file" / "made", pathlib.Path("/proc/made")):
    with pytest.raises(UsageError) as error:
      run(converted / source, output, *format)
    (problem,) = error.value.problems
    assert problem.startswith((f"{output}.partial cannot be written: ", "/proc has 0 bytes free"))


def test_an_export_that_does_not_fit_is_refused_before_it_starts(converted, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
  with pytest.raises(UsageError) as error:
    run(converted / "run", tmp_path / "made", *TO_RELEASED)
  assert f"{tmp_path} has 1.0 kB free, and " in error.value.problems[0]
  assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_do_not_go_out(converted, tmp_path, capsys):
  run_folder = shutil.copytree(converted / "run", tmp_path / "run")
  step = run_folder / "checkpoints" / "0"
  array = open_items(step)["params"]["layer_3/attn/wq_a"]
  writable = ts.open(array.spec().to_json(), open=True, read=True, write=True).result()
  writable[0, 0].write(np.float32(np.nan)).result()
  (step / manifest.NAME).unlink()
  manifest.write_manifest(step)
  assert run(run_folder, tmp_path / "made", *TO_RELEASED) == Exit.CHECK_FAILED
  assert "layer_3/attn/wq_a holds values that are not finite." in capsys.readouterr().err
  assert not list(tmp_path.glob("made*"))


@pytest.mark.parametrize(
  ("arguments", "problems"),
  [
    ((), ["--checkpoint is missing.", "--output is missing.", "--format is missing."]),
    (("--checkpoint", "X", "--output", "Y", "--format", "released"),
     ["--format released needs --dtype, one of released, bfloat16."]),
    (("--checkpoint", "X", "--output", "Y", "--format", "hf", "--dtype", "fp8"),
     ["--format must be one of checkpoint, released, got hf.",
      "--dtype must be one of released, bfloat16, got fp8.",
      "--dtype goes with --format released; a checkpoint of ours is float32."]),
    (("--checkpoint", "/nowhere", "--output", "/tmp", "--format", "checkpoint"),
     ["--checkpoint /nowhere is not a folder.",
      "--output /tmp exists; name a folder that does not."]),
    (("--checkpoint", "s3://a", "--output", "gs://c", "--format", "checkpoint"),
     ["--checkpoint s3://a must be a local folder.", "--output gs://c must be a local folder."]),
    (("--checkpoint", "X", "--output", "Y", "--format", "checkpoint", "--carry-from", "none"),
     ["--carry-from goes with --format released."]),
  ],
)  # fmt: skip
def test_every_problem_of_the_arguments_is_told_at_once(arguments, problems):
  with pytest.raises(UsageError) as error:
    convert.main(arguments)
  assert list(error.value.problems) == problems


@pytest.mark.slow
@pytest.mark.parametrize(
  ("source", "format"), [("run", TO_RELEASED), ("released", TO_CHECKPOINT)], ids=["out", "in"]
)
def test_a_killed_conversion_leaves_no_folder_and_the_next_one_succeeds(
  converted, tmp_path, source, format
):
  output, partial = tmp_path / "made", tmp_path / "made.partial"
  command = [sys.executable, "-m", "train", "convert", "--checkpoint", str(converted / source)]
  command += ["--output", str(output), *format]
  for _ in range(20):  # until one is killed on its way
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not partial.exists():
      time.sleep(0.0005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if not output.exists():
      break
    shutil.rmtree(output)
  assert partial.exists() and not output.exists()
  assert run(converted / source, output, *format) == Exit.DONE
  assert not partial.exists()
  if source == "run":
    assert fingerprint(output) == fingerprint(converted / "released")
  else:
    assert manifest.verify_step(output / "checkpoints" / "0") == []
