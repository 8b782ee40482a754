"""What a run starts from where it has no checkpoint of its own, and what it remembers of that.

`sft` starts from the parameters and router biases of another run, with a new optimizer and from the
beginning of its data. start.json in the run folder names them, and counts the tensors of a release
that stayed behind; without that file it is pretraining.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from deepseek_jax.checkpoint import CheckpointError, restore_step
from deepseek_jax.optim.low_rank import without_factors
from deepseek_jax.step import TrainState
from deepseek_jax.storage_path import StoragePath, storage_path, write_atomically
from train.errors import UsageError
from train.processes import say
from train.programs import Programs
from train.run_folder import RunFolder
from train.settings import INIT, PRETRAIN, SFT, CommandLine, differences
from train.stored_step import StoredStep, find_step

FILE = "start.json"
CONVERT = "convert"  # the verb of a folder that is only there to be started from
# What may differ from the run that one starts from without a word: all that is no number of the
# model, and what a stage may change.
UNSAID = (
  *("data", "objective", "optim", "mesh", "checkpoint", "validation", "log", "profile"),
  *("tokens", "total_steps", "accumulation", "seed", "max_skipped_steps"),
  *("model.numerics", "model.indexer.pool_source", "model.remat", "model.moe.receive_factor"),
)


class Origin(NamedTuple):
  verb: str = PRETRAIN
  given: str | None = None  # absolute, as it was named
  stored: StoredStep | None = None  # None: random weights, or the run's own checkpoint


def find_origin(command: CommandLine, folder: RunFolder, step: int) -> Origin:
  """Where the run starts, or started if it has taken steps.

  Raises: UsageError for --init that is missing, no checkpoint, or not that of the run; for a folder
    that another verb has begun; and for factors without weights to begin from.
  """
  rank = command.settings.optim.low_rank.rank
  if rank and command.verb == PRETRAIN:
    raise UsageError(
      [
        f"optim.low_rank.rank is {rank}, but factors change weights that are trained already; "
        f"{PRETRAIN} takes 0, which trains the weights."
      ]
    )
  given = None if command.init is None else str(storage_path(command.init).absolute())
  if step:
    _check_same(command.verb, given, folder)
    return Origin(command.verb, given)
  if _read(folder.path)["verb"] == CONVERT:
    problem = (
      f"{folder.path} is what {CONVERT} made; start from it with {SFT} and another --workdir."
    )
    raise UsageError([problem])
  if command.verb != SFT:
    return Origin(command.verb)
  if command.init is None:
    raise UsageError([f"{INIT} is missing; it names the run folder or checkpoint to start from."])
  stored = find_step(INIT, command.init)
  ours, theirs = command.settings.model.vocab, stored.settings.model.vocab
  if ours != theirs:
    raise UsageError(
      [
        f"model.vocab is {ours} and that of {stored.path} is {theirs}; only {CONVERT} "
        f"--resize-vocab {ours} changes embedding and head, on the way from a release."
      ]
    )
  return Origin(command.verb, given, stored)


def remember(origin: Origin, folder: RunFolder) -> None:
  """Writes start.json for a run that takes its first step; the first process does."""
  if folder.lock is None:
    return
  stored = None if origin.stored is None else origin.stored.path
  parts = {} if stored is None else parts_behind(stored.parent.parent)
  write_origin(folder.path, origin.verb, origin.given, stored, parts)


def write_origin(
  run: StoragePath,
  verb: str,
  given: str | None,
  checkpoint: StoragePath | None,
  parts: Mapping[str, int],
) -> None:
  """start.json of a run folder; `parts` are counts of released tensors that the model lacks."""
  stored = None if checkpoint is None else str(checkpoint)
  values = {"verb": verb, "init": given, "checkpoint": stored, "parts": dict(parts)}
  write_atomically(run / FILE, (json.dumps(values, indent=2) + "\n").encode())


def parts_behind(run: StoragePath) -> dict[str, int]:
  """How many tensors the release that a run goes back to had besides the backbone, by part.

  Raises: UsageError for a start.json that cannot be read.
  """
  return _read(run)["parts"]


def first_state(origin: Origin, programs: Programs, settings: Any, tokenizer: str) -> TrainState:
  """The state before step 1, from the checkpoint of an origin that has one.

  Args:
    origin: found.
    programs: those of the first stage.
    settings: of the first stage.
    tokenizer: SHA-256 of that of the data.

  Raises: UsageError for other shapes, another tokenizer, and files that cannot be read.
  """
  stored, abstract = origin.stored, programs.abstract_state
  assert stored is not None
  weights = without_factors(abstract.params)
  try:
    found = restore_step(stored.path, {"params": weights, "router": abstract.balance}, verify=False)
  except CheckpointError as error:
    raise UsageError([str(error)]) from error
  known = found.data.get("tokenizer")
  if known is None:
    say(f"{stored.path} does not say with which tokenizer it was trained.")
  elif known != tokenizer:
    raise UsageError(
      [
        f"{stored.path} was trained with another tokenizer than that of {settings.data.paths[0]}; "
        "prepare the data with the tokenizer.json of its own data."
      ]
    )
  for sentence in differences(stored.settings, settings, ignoring=UNSAID):
    say(f"{sentence} The parameters fit, the model computes something else.")
  return programs.start(found.items["params"], found.items["router"])


def _check_same(verb: str, given: str | None, folder: RunFolder) -> None:
  """Raises UsageError unless the run in the folder is one of the verb, from `given` if any."""
  begun = _read(folder.path)
  began_as, *begun_from = (begun[name] for name in ("verb", "init", "checkpoint"))
  if began_as != verb:
    raise UsageError(
      [f"The run in {folder.path} is one of {began_as}; {verb} needs another --workdir."]
    )
  if given is not None and given not in begun_from:
    raise UsageError(
      [
        f"The run in {folder.path} began from {begun_from[0]}, not from {given}; leave {INIT} out, "
        "or use another --workdir."
      ]
    )


def checkpoint_of(stored: StoredStep) -> str | None:
  """Path of the step that the run of a step began from; None for random weights."""
  return _read(stored.path.parent.parent)["checkpoint"]


def _read(run: StoragePath) -> dict[str, Any]:
  path, unsaid = run / FILE, {"verb": PRETRAIN, "init": None, "checkpoint": None, "parts": {}}
  try:
    return unsaid | json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return unsaid
  except (OSError, ValueError, TypeError) as error:
    raise UsageError([f"{path} cannot be read ({error})."]) from error
