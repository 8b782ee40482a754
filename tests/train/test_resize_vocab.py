"""Embedding and head get another number of rows on request alone, and then for a tokenizer that
fits."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from deepseek_jax.checkpoint.safetensors_file import read_safetensors
from deepseek_jax.checkpoint.stored_arrays import open_items
from train import convert
from train.errors import Exit, UsageError
from train.origin import find_origin
from train.run_folder import RunFolder
from train.settings import CommandLine
from train.stored_step import find_step

CASE = pathlib.Path(__file__).resolve().parents[1] / "reference" / "quantized_model"
VOCAB = 64


def resized(source, output, *more):
  words = ["--checkpoint", str(source), "--output", str(output), "--format", "checkpoint"]
  return convert.main([*words, *map(str, more)])


def problems(*arguments):
  with pytest.raises(UsageError) as error:
    resized(*arguments)
  return list(error.value.problems)


def write_tokenizer(path, words):
  vocabulary = {word: number for number, word in enumerate(words)}
  Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])).save(str(path))
  return path


@pytest.fixture
def tokenizer(tmp_path):
  """A word for every class that Engram's hash knows, and capitals of the same words."""
  known = json.loads((CASE / "config.json").read_text())["text_config"]
  classes = known["engram_compressed_vocab_size"]
  words = [f"word{number}" for number in range(classes)]
  words += [word.upper() for word in words[: VOCAB + 6 - classes]]
  return write_tokenizer(tmp_path / "tokenizer.json", words)


def test_new_rows_are_the_mean_of_the_old_ones_and_all_else_is_as_it_was(
  converted, tokenizer, tmp_path, capsys
):
  more = ("--resize-vocab", 70, "--tokenizer", tokenizer, "--config.mesh.expert=2")
  assert resized(converted / "case", tmp_path / "run", *more, "--config.mesh.fsdp=4") == Exit.DONE
  assert "6 new rows of embedding and head are the mean of the others." in capsys.readouterr().out
  assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["vocab"] == 70
  source = read_safetensors(CASE / "weights.safetensors")
  found, before = (open_items(f / "checkpoints" / "0")["params"]
                   for f in (tmp_path / "run", converted / "run"))  # fmt: skip
  for name, array in found.items():
    values, old = array.read().result(), before[name].read().result()
    if name in ("embed", "head"):
      assert values.shape == (70, 64)
      mean = source[f"{name}.weight"].astype(np.float32).mean(0)
      np.testing.assert_allclose(values[VOCAB:], np.broadcast_to(mean, (6, 64)), atol=1e-6)
      values = values[:VOCAB]
    np.testing.assert_array_equal(values, old, name)


@pytest.mark.slow
def test_a_smaller_vocabulary_drops_the_last_rows(converted, tmp_path, capsys):
  assert resized(converted / "case", tmp_path / "run", "--resize-vocab", 60) == Exit.DONE
  assert "The last 4 rows of embedding and head are dropped." in capsys.readouterr().out
  embed = open_items(tmp_path / "run" / "checkpoints" / "0")["params"]["embed"].read().result()
  before = open_items(converted / "run" / "checkpoints" / "0")["params"]["embed"]
  np.testing.assert_array_equal(embed, before[:60].read().result())


def test_without_the_request_another_vocabulary_is_refused_with_the_name_of_the_option(
  converted, tmp_path
):
  assert problems(converted / "case", tmp_path / "run", "--config.model.vocab=70") == [
    "The released vocabulary has 64 tokens; --resize-vocab 70 changes embedding and head, "
    "--config.model.vocab does not."
  ]
  assert not list(tmp_path.glob("run*"))


def test_a_tokenizer_that_does_not_fit_is_refused_with_every_reason(converted, tmp_path, tokenizer):
  source = shutil.copytree(converted / "case", tmp_path / "release")
  shutil.copy(tokenizer, source / "tokenizer.json")
  words = [f"word{number}" for number in range(71)]
  words[3] = "other"
  other = write_tokenizer(tmp_path / "other.json", words)
  more = ("--resize-vocab", 70, "--tokenizer", other)
  size, token, classes = problems(source, tmp_path / "run", *more)
  assert size == f"--resize-vocab is 70, but {other} has 71 token ids."
  assert token == f"Token 3 is 'other' in {other} and 'word3' in {source / 'tokenizer.json'}."
  assert classes.startswith(f"{other} has 71 classes of tokens that read alike, and the hash of ")
  assert not (tmp_path / "run").exists()


def test_a_run_with_another_vocabulary_than_its_origin_is_told_the_option(converted, tmp_path):
  stored = find_step("--init", str(converted / "run"))
  model = dataclasses.replace(stored.settings.model, vocab=70)
  settings = dataclasses.replace(stored.settings, model=model)
  command = CommandLine(settings, str(tmp_path), verb="sft", init=str(converted / "run"))
  with pytest.raises(UsageError) as error:
    find_origin(command, RunFolder(tmp_path, lock=None), 0)
  assert error.value.problems == (
    f"model.vocab is 70 and that of {stored.path} is 64; only convert --resize-vocab 70 changes "
    "embedding and head, on the way from a release.",
  )


def test_arguments_that_make_no_sense_are_refused(converted, tmp_path):
  assert problems(
    converted / "case", tmp_path / "run", "--resize-vocab", "0.5", "--tokenizer", tmp_path
  ) == ["--resize-vocab must be a number of tokens, got 0.5."]
  assert problems(converted / "case", tmp_path / "run", "--tokenizer", tmp_path) == [
    "--tokenizer goes with --resize-vocab."
  ]
  unreadable = problems(
    converted / "case", tmp_path / "run", "--resize-vocab", 70, "--tokenizer", tmp_path
  )
  assert "no readable tokenizer" in unreadable[0]
