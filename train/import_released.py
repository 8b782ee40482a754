"""A released checkpoint becomes the beginning of a run: a folder with config.json and step 0."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from configs.schema import Settings
from deepseek_jax.checkpoint import CheckpointError, manifest
from deepseek_jax.checkpoint.released import COLLECTIONS
from deepseek_jax.checkpoint.released_folder import ReleasedFolder, open_released
from deepseek_jax.checkpoint.released_import import import_step
from deepseek_jax.checkpoint.released_names import parameters
from deepseek_jax.checkpoint.storage import size_text
from deepseek_jax.config import ModelConfig
from deepseek_jax.model import Model
from deepseek_jax.sharding import make_mesh, mesh_problem, slice_count, state_shardings
from deepseek_jax.storage_path import write_atomically
from train import processes
from train.batches import empty_row
from train.errors import UsageError
from train.keys import KEYS, convert, flatten, from_text, nest, unknown_key
from train.origin import CONVERT, write_origin
from train.resize_vocab import vocabulary_problems
from train.settings import resolved_json
from train.whole_folder import whole_folder


class Resize(NamedTuple):
  vocab: int  # rows of embedding and head
  tokenizer: str | None  # path of a tokenizer.json


def import_released(
  source: pathlib.Path,
  output: pathlib.Path,
  overrides: Mapping[str, str],
  devices: Sequence,
  resize: Resize | None = None,
) -> None:
  """Reads a released checkpoint into `output`, which appears when it is complete.

  Raises: UsageError for a source that is damaged or not what its config.json says; CheckpointError
    if the step cannot be written.
  """
  with processes.agreed():
    try:
      check_hashes(source)
      released = open_released(source)
    except CheckpointError as error:
      raise UsageError([str(error)]) from None
    settings = run_settings(released, overrides, devices, resize)
    mesh = make_mesh(settings.mesh, devices)
  for sentence in description(released, settings.model):
    processes.say(sentence)
  shardings = model_shardings(settings, mesh)
  meta = {"released": released.path.name}
  parts = {part: len(tensors) for part, tensors in released.parts.items()}
  with whole_folder(output) as folder:
    cfg = dataclasses.replace(settings.model, vocab=released.cfg.vocab)
    vocab, step = resize and resize.vocab, folder / "checkpoints" / "0"
    import_step(released.tensors, cfg, shardings, step, meta, vocab=vocab)
    if processes.first():
      write_atomically(folder / "config.json", resolved_json(settings).encode())
      write_origin(folder, CONVERT, str(source), None, parts)
  processes.say(f"{output} is there: start from {output / 'checkpoints' / '0'}.")


def check_hashes(source: pathlib.Path) -> None:
  """Compares the files with the hashes beside them, where there are any; the first process does."""
  if not processes.first() or not manifest.has_manifest(source):
    return
  if problems := manifest.verify_step(source):
    raise CheckpointError(f"{source} cannot be used: {'; '.join(problems)}.")


def run_settings(
  released: ReleasedFolder,
  overrides: Mapping[str, str],
  devices: Sequence,
  resize: Resize | None = None,
) -> Settings:
  """The configuration of a run that continues the model; unless told otherwise, along `fsdp`."""
  flat = flatten(dataclasses.asdict(Settings(model=released.cfg)))
  flat["mesh.fsdp"] = len(devices)
  cfg, problems = released.cfg, []
  if resize is not None:
    flat["model.vocab"] = resize.vocab
    cfg = dataclasses.replace(cfg, vocab=resize.vocab)
    if resize.tokenizer is not None:
      problems += vocabulary_problems(resize.vocab, resize.tokenizer, released.cfg, released.path)
  for key, text in overrides.items():
    try:
      flat[key] = convert(KEYS[key], from_text(KEYS[key], text))
    except KeyError:
      problems.append(unknown_key(key))
    except TypeError as error:
      problems.append(f"{key} {error}.")
  if problems:
    raise UsageError(problems)
  settings = Settings.from_dict(nest(flat))
  problems = settings.model.problems()
  if settings.model.vocab != cfg.vocab:
    problems.append(
      f"The released vocabulary has {released.cfg.vocab} tokens; --resize-vocab "
      f"{settings.model.vocab} changes embedding and head, --config.model.vocab does not."
    )
  elif _tree(settings) != _tree(Settings(model=cfg)):
    problems.append("--config.model changes the shapes of the parameters that are read.")
  mesh = mesh_problem(settings.mesh, devices=len(devices), slices=slice_count(devices))
  if problems := [*problems, *([mesh] if mesh else [])]:
    raise UsageError(problems)
  return settings


def _tree(settings: Settings) -> Any:
  return parameters(dataclasses.replace(settings.model, scan_layers=False))


def model_shardings(settings: Settings, mesh: jax.sharding.Mesh) -> Any:
  """One sharding for each of the model's variables, by collection."""
  row, key = empty_row(settings), jax.random.key(0)
  boxed = jax.eval_shape(Model(settings.model).init, key, row)
  return {name: state_shardings(boxed[name], mesh) for name in COLLECTIONS.values()}


def description(released: ReleasedFolder, cfg: ModelConfig) -> list[str]:
  """What is read and what is not, in sentences."""
  size = sum(stored.header.bytes for stored in released.tensors.values())
  ours = sum(4 * math.prod(parameter.shape) for parameter in parameters(cfg))
  sentences = [
    f"{len(released.tensors):,} tensors with {size_text(size)} become {size_text(ours)} of float32 "
    "arrays, before compression."
  ]
  if (new := cfg.vocab - released.cfg.vocab) > 0:
    sentences.append(f"{new:,} new rows of embedding and head are the mean of the others.")
  elif new < 0:
    sentences.append(f"The last {-new:,} rows of embedding and head are dropped.")
  for part, tensors in released.parts.items():
    sentences.append(
      f"{len(tensors):,} tensors of {part} stay where they are, for the model has no {part} yet; "
      "--carry-from takes them over into an export."
    )
  return sentences
