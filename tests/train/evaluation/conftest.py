"""A run folder with random weights at two steps, and one of its models, for all tests here."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.checkpoint import Checkpoints
from deepseek_jax.model import Model
from deepseek_jax.storage_path import write_atomically
from tests.train.conftest import ROOT, VOCAB
from train import settings
from train.arguments import lay_mesh
from train.batches import empty_row
from train.evaluation.checkpoints import find_checkpoints
from train.evaluation.opening import open_evaluated
from train.evaluation.request import parse

STEPS = (3, 7)


@pytest.fixture(scope="session")
def trained(prepared, tmp_path_factory):
  """A run folder as a run leaves it after step 7, its last one being 8."""
  folder = tmp_path_factory.mktemp("evaluated") / "run"
  folder.mkdir()
  write_run(folder, prepared)
  return folder


def write_run(folder, prepared, **changes):
  arguments = [f"--config={ROOT}/configs/nano.py", f"--workdir={folder}"]
  vocab = {"model.vocab": VOCAB, "model.engram.compressed_vocab": VOCAB}
  given = {name.replace("__", "."): value for name, value in changes.items()}
  overrides = {"data.paths": prepared.folder} | vocab | given
  arguments += [f"--config.{key}={value}" for key, value in overrides.items()]
  chosen = settings.parse(arguments, devices=1).settings
  write_atomically(folder / "config.json", settings.resolved_json(chosen).encode())
  checkpoints = Checkpoints(folder / "checkpoints")
  for step in STEPS:
    add_step(checkpoints, chosen, step, prepared.tokenizer_sha256)
  checkpoints.close()


def add_step(checkpoints, chosen, step, tokenizer):
  """Saves random weights that belong to the step."""
  init = lambda key: nn.unbox(Model(chosen.model).init(key, empty_row(chosen)))
  rng = np.random.default_rng(step)
  draw = lambda leaf: np.float32((leaf.ndim == 1) + 0.3 * rng.normal(size=leaf.shape))
  variables = jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))
  variables = jax.device_put(variables, jax.devices()[0])
  items = {"params": variables["params"], "router": variables["balance"]}
  checkpoints.save(step, items, {"tokenizer": tokenizer}, {})
  checkpoints.wait()


def request(folder, *words):
  """What a command line means; perplexity unless it says otherwise."""
  named = [] if any(word.startswith("--tasks") for word in words) else ["--tasks=perplexity"]
  return parse(["--checkpoint", str(folder), *named, *words])


def opened(folder, *words):
  """The model of a command line that names one checkpoint."""
  asked = request(folder, *words)
  (checkpoint,) = find_checkpoints(asked.checkpoint, asked.step)
  return open_evaluated(checkpoint, asked, lay_mesh(asked.mesh))


@pytest.fixture(scope="session")
def model(trained):
  return opened(trained, "--rows=2")
