"""`python -m train generate` on a run folder with random weights."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.checkpoint import Checkpoints
from deepseek_jax.model import Model
from tests.train.conftest import ROOT, VOCAB
from train import generate, settings
from train.__main__ import main
from train.batches import empty_row
from train.errors import Exit


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
  """A run folder as a run leaves it, at step 7."""
  folder = tmp_path_factory.mktemp("trained")
  arguments = [f"--config={ROOT}/configs/nano.py", f"--workdir={folder}"]
  vocab = {"model.vocab": VOCAB, "model.engram.compressed_vocab": VOCAB}
  overrides = {"data.paths": prepared.folder} | vocab
  arguments += [f"--config.{key}={value}" for key, value in overrides.items()]
  chosen = settings.parse(arguments, devices=1).settings
  (folder / "config.json").write_text(settings.resolved_json(chosen))
  init = lambda key: nn.unbox(Model(chosen.model).init(key, empty_row(chosen)))
  rng = np.random.default_rng(0)
  draw = lambda leaf: np.float32((leaf.ndim == 1) + 0.3 * rng.normal(size=leaf.shape))
  variables = jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))
  variables = jax.device_put(variables, jax.devices()[0])
  checkpoints = Checkpoints(folder / "checkpoints")
  items = {"params": variables["params"], "router": variables["balance"]}
  checkpoints.save(7, items, {}, {})
  checkpoints.close()
  return folder


def request(folder, *words):
  argv = ["--checkpoint", str(folder), "--prompt", "router", "--max-new-tokens", "12", *words]
  return generate.parse(argv)


@pytest.fixture(scope="module")
def loaded(trained):
  return generate.load(request(trained))


def text(loaded, folder, *words):
  return "".join(generate.write(loaded, request(folder, *words)))


def test_a_seed_gives_one_text_and_another_seed_another(loaded, trained):
  first = text(loaded, trained)
  assert len(first) > 3
  assert text(loaded, trained, "--seed=0") == first != text(loaded, trained, "--seed=1")
  assert text(loaded, trained, "--temperature=0") == text(loaded, trained, "--top-p=1e-6")


@pytest.mark.slow
def test_the_command_prints_the_text(loaded, trained, capsys):
  argv = ["--checkpoint", str(trained), "--prompt", "router", "--max-new-tokens", "12", "--step=7"]
  assert main(["generate", *argv]) == Exit.DONE
  assert capsys.readouterr().out == text(loaded, trained) + "\n"
  assert main(["generate", *argv, "--cache=plain", "--exact"]) == Exit.DONE
  assert len(capsys.readouterr().out) > 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2,tensor=2", "replica=2,expert=2,context=2"])
def test_the_text_of_eight_devices_is_that_of_one(mesh, loaded, trained):
  alone, spread = text(loaded, trained), request(trained, "--mesh", mesh)
  with jax.set_mesh(generate.lay_mesh(spread.mesh)):
    assert "".join(generate.write(generate.load(spread), spread)) == alone


@pytest.mark.slow
def test_a_text_does_not_depend_on_those_beside_it(loaded, trained):
  texts = text(loaded, trained, "--samples=3").split("--- ")[1:]
  assert texts[0].removesuffix("\n") == "0\n" + text(loaded, trained)
  assert len({text[2:] for text in texts}) == 3


@pytest.mark.parametrize(
  ("words", "sentences"),
  [
    ([], ["--checkpoint is missing.", "--prompt is missing."]),
    (["--promt=a"], ["--promt is not an argument; the nearest is --prompt."]),
    (["--config.seed=1"], ["--config.seed is not an argument"]),
    (["--temperature=-1"], ["--temperature must be at least 0, got -1.0."]),
    (["--top-p=0"], ["--top-p must be more than 0 and at most 1, got 0.0."]),
    (["--samples=x"], ["--samples must be an integer, got 'x'."]),
    (["--max-new-tokens=0"], ["--max-new-tokens must be at least 1, got 0."]),
    (["--mesh=fsd=2"], ["--mesh is fsd=2, accepted are AXIS=DEVICES,... with the axes replica"]),
    (["--mesh=fsdp=0"], ["--mesh is fsdp=0, accepted are"]),
    (["--cache=fp8"], ["--cache is 'fp8', accepted are packed and plain."]),
  ],
)
def test_every_problem_of_the_arguments_is_one_sentence(words, sentences, capsys):
  assert main(["generate", *words]) == Exit.USAGE
  error = capsys.readouterr().err
  assert all(sentence in error for sentence in sentences)
  assert "Traceback" not in error


@pytest.mark.parametrize(
  ("change", "words", "sentence"),
  [
    (lambda f: shutil.rmtree(f), (), "is no folder of a run"),
    (lambda f: (f / "config.json").write_text("{"), (), "config.json cannot be read"),
    (lambda f: shutil.rmtree(f / "checkpoints"), (), "has no complete checkpoint."),
    (lambda f: None, ("--step=3",), "--step is 3, the complete checkpoints of"),
    (lambda f: None, ("--data=nowhere",), "There is no tokenizer: nowhere is no folder"),
    (lambda f: None, ("--mesh=fsdp=16",), "--mesh needs 16 devices, there are 8."),
    (lambda f: damage(f), (), "cannot be used"),
    (lambda f: widen(f), (), "do not fit the configuration"),
    (lambda f: shrink(f), (), "the model's vocabulary 64."),
  ],
)
def test_what_is_missing_or_damaged_is_one_sentence(
  change, words, sentence, trained, tmp_path, capsys
):
  folder = shutil.copytree(trained, tmp_path / "run")
  change(folder)
  arguments = ["--checkpoint", str(folder), "--prompt", "a", *words]
  assert main(["generate", *arguments]) == Exit.USAGE
  error = capsys.readouterr().err
  assert sentence in error
  assert "Traceback" not in error


def damage(folder):
  files = [p for p in (folder / "checkpoints" / "7").rglob("*") if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)


def change_model(folder, **values):
  config = json.loads((folder / "config.json").read_text())
  config["model"] |= values
  (folder / "config.json").write_text(json.dumps(config))


def widen(folder):
  change_model(folder, dim=64)


def shrink(folder):
  change_model(folder, vocab=64)


def test_text_that_spells_a_special_token_stays_text(loaded):
  ids = loaded.tokenizer.encode("<｜end▁of▁sentence｜>", add_special_tokens=False).ids
  assert loaded.prepared.eos not in ids and len(ids) > 1
