"""What a run starts from where it has no checkpoint of its own, and what it remembers of that.

`sft` starts from the parameters and router biases of another run, with a new optimizer and from the
beginning of its data. start.json in the run folder names them; without that file it is pretraining.
"""

import json
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
  if command.verb != SFT:
    return Origin(command.verb)
  if command.init is None:
    raise UsageError([f"{INIT} is missing; it names the run folder or checkpoint to start from."])
  return Origin(command.verb, given, find_step(INIT, command.init))


def remember(origin: Origin, folder: RunFolder) -> None:
  """Writes start.json for a run that takes its first step; the first process does."""
  if folder.lock is None:
    return
  stored = None if origin.stored is None else str(origin.stored.path)
  values = {"verb": origin.verb, "init": origin.given, "checkpoint": stored}
  write_atomically(folder.path / FILE, (json.dumps(values, indent=2) + "\n").encode())


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
  begun = _begun(folder.path)
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
  return _begun(stored.path.parent.parent)["checkpoint"]


def _begun(folder: StoragePath) -> dict[str, str | None]:
  """What `remember` wrote into a run folder. Raises UsageError."""
  path = folder / FILE
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return {"verb": PRETRAIN, "init": None, "checkpoint": None}
  except (OSError, ValueError) as error:
    raise UsageError([f"{path} cannot be read ({error})."]) from error
