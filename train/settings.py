"""Command line and configuration file -> frozen Settings, with every problem named at once."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from configs.base import UNITS
from configs.schema import Settings
from deepseek_jax.storage_path import url_problem
from train import checks, config_file, stages
from train.errors import UsageError, hint
from train.keys import KEYS, convert, flatten, from_text, nest, unknown_key

OVERRIDE = "--config."
ARGUMENTS = ("--config", "--workdir")
INIT = "--init"  # of sft
ALLOW_CHANGE = "--allow-change"  # takes no value


PRETRAIN, SFT = "pretrain", "sft"


class CommandLine(NamedTuple):
  settings: Settings
  workdir: str
  allow_change: bool = False  # continue a run although it will compute something else
  verb: str = PRETRAIN
  init: str | None = None  # the checkpoint to start from, where one is given


class Arguments(NamedTuple):
  """A command line, taken apart but not yet understood."""

  values: dict[str, str]  # "--config" and "--workdir", where given
  overrides: dict[str, str]  # dotted key -> text
  problems: list[str]
  flags: set[str]  # "--allow-change", where given


def arguments_of(verb: str) -> tuple[str, ...]:
  """Arguments with a value that a training verb takes, beside --config.KEY=VALUE."""
  return (*ARGUMENTS, INIT) if verb == SFT else ARGUMENTS


def parse(
  argv: Sequence[str], *, devices: int, slices: int = 1, verb: str = PRETRAIN
) -> CommandLine:
  """What `--config FILE[:variant] --workdir DIR [--allow-change] [--config.key=value ...]` means.

  Args:
    argv: without the program and the verb.
    devices: how many the run has, over all hosts.
    slices: how many TPU slices these are (sharding.slice_count).
    verb: PRETRAIN, or SFT, which also takes --init CHECKPOINT.

  Raises: UsageError with every problem of the arguments, the file, the types and the combinations.
  """
  arguments = split(argv, arguments_of(verb))
  problems = list(arguments.problems)
  problems += [f"{name} is missing." for name in ARGUMENTS if name not in arguments.values]
  settings = None
  try:
    settings = load(arguments.values.get("--config"), arguments.overrides)
  except UsageError as error:
    problems += error.problems
  if settings is not None and "--config" in arguments.values:
    problems += checks.problems(
      settings, devices=devices, slices=slices, measures_replay=verb == SFT
    )
  if settings is None or problems:
    raise UsageError(problems)
  return CommandLine(
    settings,
    arguments.values["--workdir"],
    allow_change=ALLOW_CHANGE in arguments.flags,
    verb=verb,
    init=arguments.values.get(INIT),
  )


def split(
  argv: Sequence[str],
  names: Sequence[str] = ARGUMENTS,
  switches: Sequence[str] = (ALLOW_CHANGE,),
) -> Arguments:
  """Sorts the arguments; both --name=value and --name value are accepted.

  Args:
    argv: without the program and the verb.
    names: arguments with a value, beside --config.KEY=VALUE; those of a training verb.
    switches: arguments without one.

  ml_collections.config_flags would do this too, but it stops at the first problem, and shows a
  traceback for an unknown key.
  """
  arguments = Arguments({}, {}, [], set())
  words = list(argv)
  while words:
    name, equals, value = words.pop(0).partition("=")
    if name in switches and not equals:
      arguments.flags.add(name)
      continue
    override = name.startswith(OVERRIDE)
    if not override and name not in names:
      known = hint(name, (*names, *switches), f"{', '.join(names)}, {OVERRIDE}KEY")
      arguments.problems.append(f"{name} is not an argument; {known}.")
      if not equals and words and not words[0].startswith("--"):
        words.pop(0)  # its value
      continue
    if not equals and words and not words[0].startswith("--"):
      value = words.pop(0)
    if not value:
      arguments.problems.append(f"{name} needs a value.")
      continue
    if name in ("--workdir", INIT) and (problem := url_problem(name, value)):
      arguments.problems.append(problem)
    if override:
      arguments.overrides[name.removeprefix(OVERRIDE)] = value
    else:
      arguments.values[name] = value
  return arguments


def load(config: str | None, overrides: Mapping[str, str]) -> Settings:
  """The configuration file's Settings with the overrides laid on top; None: all defaults.

  Raises: UsageError with every problem of the file, of unknown keys and of types.
  """
  flat, problems = {}, []
  try:
    flat = flatten(config_file.load(config).to_dict()) if config else {}
  except UsageError as error:
    problems += error.problems
  of_stages = {key: text for key, text in overrides.items() if key.startswith(stages.PREFIX)}
  for key, text in overrides.items():
    if key not in of_stages:
      flat[key] = from_text(KEYS[key], text) if key in KEYS else text
  typed: dict[str, Any] = {}
  typed["stages"], said = stages.read_stages(flat.pop("stages", ()), of_stages)
  problems += said
  for key, value in flat.items():
    if key not in KEYS:
      problems.append(unknown_key(key))
      continue
    try:
      typed[key] = convert(KEYS[key], value)
    except TypeError as error:
      problems.append(f"{key} {error}.")
  if problems:
    raise UsageError(problems)
  return Settings.from_dict(nest(typed))


def resolved_json(settings: Settings) -> str:
  """The content of config.json: every key, nested."""
  return json.dumps(dataclasses.asdict(settings), indent=2) + "\n"


def settings_from_json(text: str) -> Settings:
  """The inverse of `resolved_json`. Raises ValueError for text of another version."""
  return Settings.from_dict(json.loads(text))


def differences(stored: Settings, given: Settings, ignoring: Sequence[str] = ()) -> list[str]:
  """One sentence per key whose value is not the stored one; `ignoring` names keys and sections."""
  old, new = stages.flat(stored), stages.flat(given)
  return [
    f"{key} was {old.get(key, 'not set')} and is now {new.get(key, 'not set')}."
    for key in dict.fromkeys((*old, *new))
    if old.get(key) != new.get(key) and not _named(key, ignoring)
  ]


def _named(key: str, names: Sequence[str]) -> bool:
  """Whether a key, of the run or of a stage, or a section around it is one of the names."""
  if key.startswith(stages.PREFIX):
    key = key.removeprefix(stages.PREFIX).partition(".")[2]
  return any(key == name or key.startswith(f"{name}.") for name in names)


def help_text(verb: str) -> str:
  """Usage of a training verb, with every key, its default and its unit."""
  defaults = flatten(dataclasses.asdict(Settings()))
  rows = [f"  {key} = {_short(defaults[key])}  ({unit})" for key, unit in UNITS.items()]
  init = f" [{INIT} CHECKPOINT]" if verb == SFT else ""
  usage = (
    f"python -m train {verb} --config FILE.py[:variant] --workdir DIR{init} [--allow-change] "
    "[--config.KEY=VALUE ...]"
  )
  of_init = (
    f"{INIT}  the run folder, or the step in its checkpoints/, whose parameters a new run starts "
    "from; one that goes on needs none\n"
  )
  meaning = (of_init if init else "") + (
    "--allow-change  continue the run in DIR although its configuration has changed in a way that "
    "changes results"
  )
  return "\n".join([usage, "", meaning, "", "KEY = default  (unit)", *rows])


def _short(value: Any) -> str:
  text = str(value)
  return text if len(text) <= 40 else text[:37] + "..."
