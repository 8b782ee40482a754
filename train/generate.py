"""`python -m train generate`: writes on from a prompt with the newest weights of a run."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from configs.schema import Settings
from data.errors import DataError
from data.plain_tokenizer import plain_tokenizer
from data.prepared import TOKENIZER, Prepared, load_prepared
from deepseek_jax.checkpoint import CheckpointError, manifest, restore_step
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sampling.cache import decoding_config
from deepseek_jax.sampling.generate import Sampling, generate
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.sampling.weights import unrolled
from deepseek_jax.sharding import MESH_AXES, make_mesh, state_shardings
from deepseek_jax.storage_path import StoragePath, storage_path, url_problem
from deepseek_jax.training_config import MeshConfig
from train import keys, settings
from train.batches import empty_row
from train.errors import Exit, UsageError

USAGE = """python -m train generate --checkpoint DIR --prompt TEXT [--NAME VALUE ...]

--checkpoint      folder of a run
--prompt          text to write on from
--step            which checkpoint of the run; the newest where it is left out
--data            folder of the prepared data with the tokenizer; the run's where it is left out
--max-new-tokens  tokens, at most (128)
--samples         texts to write, side by side (1)
--temperature     0 takes the likeliest token, 1 draws from the model (1)
--top-p           share of the probability that is drawn from, in (0, 1] (1)
--seed            of the random numbers; a text is the same for any number of samples (0)
--cache           packed: FP4 and FP8 bytes as the release serves them; plain: as computed (packed)
--mesh            devices to spread over, as in fsdp=2,expert=4 (one device)
--exact           every token of the prompt goes through every layer, not only the last window"""
TEXTS = ("--checkpoint", "--prompt", "--data", "--cache", "--mesh")
NUMBERS: dict[str, tuple[Any, str, Callable[[Any], bool]]] = {  # default, what is accepted
  "--step": (None, "at least 0", lambda n: n >= 0),
  "--max-new-tokens": (128, "at least 1", lambda n: n >= 1),
  "--samples": (1, "at least 1", lambda n: n >= 1),
  "--temperature": (1.0, "at least 0", lambda x: x >= 0),
  "--top-p": (1.0, "more than 0 and at most 1", lambda x: 0 < x <= 1),
  "--seed": (0, "from 0 to 2147483647", lambda n: 0 <= n < 2**31),
}
CACHES = {"packed": True, "plain": False}


class Request(NamedTuple):
  checkpoint: str
  prompt: str
  data: str | None
  packed: bool
  mesh: MeshConfig
  exact: bool
  step: int | None
  max_new_tokens: int
  samples: int
  sampling: Sampling


class Trained(NamedTuple):
  """What a run left, ready to write with."""

  sampler: Sampler
  prepared: Prepared
  tokenizer: Tokenizer
  step: int


def main(argv: Sequence[str]) -> int:
  """Prints the text as it is written. Raises UsageError with every problem."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE)
    return Exit.DONE
  request = parse(argv)
  with jax.set_mesh(lay_mesh(request.mesh)):
    for piece in write(load(request), request):
      print(piece, end="", flush=True)
  print()
  return Exit.DONE


def parse(argv: Sequence[str]) -> Request:
  """The command line. Raises UsageError with every problem."""
  found = settings.split(argv, (*TEXTS, *NUMBERS), switches=("--exact",))
  values, problems = dict(found.values), list(found.problems)
  refused = "is not an argument: a checkpoint brings its configuration."
  problems += [f"--config.{key} {refused}" for key in found.overrides]
  problems += [f"{name} is missing." for name in ("--checkpoint", "--prompt") if name not in values]
  for name in ("--checkpoint", "--data"):
    problems += [p for p in (url_problem(name, values.get(name, "")),) if p]
  cache = values.get("--cache", "packed")
  if cache not in CACHES:
    problems.append(f"--cache is {cache!r}, accepted are {' and '.join(CACHES)}.")
  number = {name: default for name, (default, _, _) in NUMBERS.items()}
  for name, (default, accepted, accepts) in NUMBERS.items():
    if name not in values:
      continue
    kind = float if isinstance(default, float) else int
    try:
      number[name] = keys.convert(kind, keys.from_text(kind, values[name]))
    except TypeError as error:
      problems.append(f"{name} {error}.")
      continue
    if not accepts(number[name]):
      problems.append(f"{name} must be {accepted}, got {number[name]}.")
  mesh, problem = _mesh_config(values.get("--mesh"))
  problems += [problem] if problem else []
  if problems:
    raise UsageError(problems)
  return Request(
    checkpoint=values["--checkpoint"],
    prompt=values["--prompt"],
    data=values.get("--data"),
    packed=CACHES[cache],
    mesh=mesh,
    exact="--exact" in found.flags,
    step=number["--step"],
    max_new_tokens=number["--max-new-tokens"],
    samples=number["--samples"],
    sampling=Sampling(number["--temperature"], number["--top-p"], number["--seed"]),
  )


def _mesh_config(text: str | None) -> tuple[MeshConfig, str | None]:
  """What --mesh says, or what is wrong with it."""
  pairs = [pair.partition("=") for pair in text.split(",")] if text else []
  sizes = {axis: int(size) if size.isdecimal() else 0 for axis, _, size in pairs}
  if set(sizes) <= set(MESH_AXES) and all(sizes.values()):
    return MeshConfig(**sizes), None
  axes = ", ".join(MESH_AXES)
  return MeshConfig(), f"--mesh is {text}, accepted are AXIS=DEVICES,... with the axes {axes}."


def lay_mesh(cfg: MeshConfig) -> Mesh:
  """The mesh on the first devices. Raises UsageError where there are not so many."""
  wanted, devices = math.prod(dataclasses.asdict(cfg).values()), jax.devices()
  if wanted > len(devices):
    raise UsageError([f"--mesh needs {wanted} devices, there are {len(devices)}."])
  return make_mesh(cfg, devices[:wanted])


def load(request: Request) -> Trained:
  """Weights, configuration and tokenizer of a run, on the mesh of the request.

  Raises: UsageError if something is missing.
  """
  folder = storage_path(request.checkpoint)
  trained_with = run_settings(folder)
  cfg = trained_with.model
  data = request.data or next(iter(trained_with.data.paths), None)
  if data is None:
    raise UsageError([f"{folder / 'config.json'} names no data: --data must name the tokenizer's."])
  prepared, tokenizer = _tokenizer(data)
  if prepared.vocab > cfg.vocab:
    raise UsageError(
      [f"The tokenizer in {data} has {prepared.vocab} tokens, the model's vocabulary {cfg.vocab}."]
    )
  problems = decoding_config(cfg, packed=request.packed).problems()
  if problems:
    raise UsageError([*problems, "--cache plain keeps rows as they are computed."])
  try:
    hashing = NgramHash(cfg.engram, prepared.compressed_id()) if cfg.engram.layers else None
    step = _step(folder, request.step)
    mesh = lay_mesh(request.mesh)
    variables = restore(folder / "checkpoints" / str(step), trained_with, mesh)
  except (CheckpointError, DataError, ValueError) as error:
    raise UsageError([str(error)]) from error
  return Trained(Sampler(cfg, variables, hashing, packed=request.packed), prepared, tokenizer, step)


def run_settings(folder: StoragePath) -> Settings:
  """The configuration of a run, from its folder. Raises UsageError."""
  path = folder / "config.json"
  try:
    return settings.settings_from_json(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise UsageError([f"--checkpoint {folder} is no folder of a run: no {path}."]) from None
  except OSError as error:
    raise UsageError([f"{path} cannot be read: {error.strerror}."]) from error
  except (ValueError, TypeError) as error:
    raise UsageError([f"{path} cannot be read: {error}."]) from error


def _tokenizer(data: str) -> tuple[Prepared, Tokenizer]:
  try:
    prepared = load_prepared(data)
    tokenizer = Tokenizer.from_buffer((prepared.folder / TOKENIZER).read_bytes())
  except FileNotFoundError:
    problem = f"There is no tokenizer: {data} is no folder that `prepare` has finished."
    raise UsageError([problem, "--data names another one."]) from None
  except OSError as error:
    raise UsageError([f"{data} cannot be read: {error.strerror}."]) from error
  except DataError as error:
    raise UsageError([str(error)]) from error
  except Exception as error:  # the library raises no other
    raise UsageError([f"{data}/{TOKENIZER} is no readable tokenizer: {error}."]) from error
  return prepared, plain_tokenizer(tokenizer)


def _step(folder: StoragePath, wanted: int | None) -> int:
  steps = manifest.complete_steps(folder / "checkpoints")
  if not steps:
    raise UsageError([f"{folder} has no complete checkpoint."])
  if wanted is not None and wanted not in steps:
    have = ", ".join(map(str, steps))
    raise UsageError([f"--step is {wanted}, the complete checkpoints of {folder} are {have}."])
  return steps[-1] if wanted is None else wanted


def restore(step_folder: StoragePath, trained_with: Settings, mesh: Mesh) -> Any:
  """{"params", "balance"} of a step with a subtree per layer, on the mesh.

  Raises: CheckpointError if the step is damaged or does not fit the configuration.
  """
  cfg, key = trained_with.model, jax.random.key(0)
  boxed = jax.eval_shape(jax.jit(Model(cfg).init), key, empty_row(trained_with))
  shapes = jax.tree.map(
    lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
    nn.unbox(boxed),
    state_shardings(boxed, mesh),
  )
  items = {"params": shapes["params"], "router": shapes["balance"]}
  restored = restore_step(step_folder, items).items
  return {
    "params": unrolled(cfg, restored["params"]),
    "balance": unrolled(cfg, restored["router"]),
  }


def write(trained: Trained, request: Request) -> Iterator[str]:
  """Pieces of text: of one sample as they come, of several one text after the other."""
  sampler, prepared, tokenizer = trained.sampler, trained.prepared, trained.tokenizer
  ids = tokenizer.encode(request.prompt, add_special_tokens=False).ids
  prompt = np.array([prepared.bos, *ids], np.int32)
  streams = [DecodeStream(ids[-8:], skip_special_tokens=True) for _ in range(request.samples)]
  texts: list[list[str]] = [[] for _ in streams]
  steps = generate(
    sampler,
    [prompt] * request.samples,
    request.sampling,
    max_new_tokens=request.max_new_tokens,
    end=prepared.eos,
    vocab=prepared.vocab,
    exact=request.exact,
  )
  alone = request.samples == 1
  for tokens in steps:
    for stream, text, token in zip(streams, texts, tokens, strict=True):
      piece = None if token is None else stream.step(tokenizer, token)
      if piece and alone:
        yield piece
      elif piece:
        text.append(piece)
  if not alone:
    for number, text in enumerate(texts):
      yield f"{'' if number == 0 else '\n'}--- {number}\n{''.join(text)}"
