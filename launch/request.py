"""The command line of every launcher, understood and checked as a whole."""

import dataclasses
import difflib
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from configs.schema import Settings
from deepseek_jax.sharding import MESH_AXES
from launch import xla_flags
from launch.machines import Machines, parse_machines
from train import checks, settings
from train.__main__ import TRAINING
from train.errors import UsageError

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
DRY_RUN = "--dry-run"
# The longest name with which JobSet's pods still have valid ones (63 characters in all).
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


class Option(NamedTuple):
  meaning: str
  default: str | None = None  # shown to people; None: none
  required: bool = False
  switch: bool = False  # takes no value


COMMON = {
  "--verb": Option(f"training verb: {', '.join(TRAINING)}", "pretrain"),
  DRY_RUN: Option("print what would be run, and run nothing", switch=True),
}
MACHINES = {
  "--topology": Option("chips of a slice, as in v5p:8x8x8, or GPUs, as in h200:8", required=True),
  "--slices": Option("slices, joined by the data-centre network", "1"),
  "--name": Option("name of the job and of its resources", "from --workdir"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A run to be launched; every value is checked."""

  settings: Settings
  verb: str
  workdir: str
  training: tuple[str, ...]  # arguments that the training program gets, as typed
  options: Mapping[str, str]  # what was given of the launcher's own
  machines: Machines | None  # None: this one
  dry_run: bool

  @property
  def target(self) -> Machines:
    """The machines; only launchers with --topology have them."""
    assert self.machines is not None
    return self.machines

  @property
  def name(self) -> str:
    return self.options.get("--name") or _name_of(self.workdir)

  def command(self, python: str) -> tuple[str, ...]:
    """The training program as one process."""
    return (python, "-m", "train", self.verb, *self.training)

  def flags(self) -> tuple[xla_flags.Flag, ...]:
    """XLA's flags on `target`."""
    return xla_flags.flags(
      self.target.kind.flags, devices=self.target.devices, slices=self.target.slices
    )

  def flag_lines(self) -> str:
    """The flags as comments of a script."""
    lines = xla_flags.describe(self.target.kind.flags, self.flags())
    return "\n".join(f"# {line}" for line in lines)


# Takes the launcher's arguments, --workdir and, where they could be loaded, machines and settings.
Check = Callable[["Given"], Iterable[str]]


class Given(NamedTuple):
  """What is known of a request before all of it is known to be sound."""

  options: Mapping[str, str]
  workdir: str
  machines: Machines | None
  settings: Settings | None


def parse(argv: Sequence[str], own: Mapping[str, Option], check: Check) -> Request:
  """What the arguments of a launcher mean.

  Args:
    argv: without the program and the launcher.
    own: the launcher's arguments beyond COMMON and those of the training verb.
    check: gives a sentence for each problem that only this launcher knows.

  Raises: UsageError with every problem of the arguments, the configuration and the machines.
  """
  known = {**COMMON, **own}
  given, training = _split(argv, known)
  problems = [f"{name} needs a value." for name, value in given.items() if not value]
  problems += [
    f"{name} is missing: {option.meaning}."
    for name, option in known.items()
    if option.required and name not in given
  ]
  verb = given.get("--verb") or settings.PRETRAIN
  arguments = settings.split(training, settings.arguments_of(verb))
  problems += map(_with_launchers_names(known), arguments.problems)
  problems += [f"{name} is missing." for name in settings.ARGUMENTS if name not in arguments.values]
  if verb not in TRAINING:
    problems.append(f"--verb must be one of {', '.join(TRAINING)}, got {verb}.")
  loaded = None
  try:
    loaded = settings.load(arguments.values.get("--config"), arguments.overrides)
  except UsageError as error:
    problems += error.problems
  slices = given.get("--slices") or "1"
  if not slices.isdecimal() or int(slices) == 0:
    problems.append(f"--slices must be a positive integer, got {slices}.")
    slices = "1"
  machines = None
  if given.get("--topology"):
    try:
      machines = parse_machines(given["--topology"], int(slices))
    except ValueError as error:
      problems.append(str(error))
  workdir = arguments.values.get("--workdir", "")
  problems += check(Given(given, workdir, machines, loaded))
  if "--name" in own and workdir:
    problems += _name_problems(given.get("--name"), workdir)
  if loaded is not None and machines is not None and "--config" in arguments.values:
    problems += checks.problems(
      loaded,
      devices=machines.devices,
      slices=machines.slices,
      reads_data=False,
      measures_replay=verb == settings.SFT,
    )
  if loaded is None or problems:
    raise UsageError(problems)
  return Request(
    settings=loaded,
    verb=verb,
    workdir=workdir,
    training=tuple(training),
    options={name: value for name, value in given.items() if name != DRY_RUN},
    machines=machines,
    dry_run=DRY_RUN in given,
  )


def mesh_devices(loaded: Settings) -> int:
  """How many devices the mesh of a configuration has."""
  return math.prod(getattr(loaded.mesh, axis) for axis in MESH_AXES)


def help_text(launcher: str, own: Mapping[str, Option]) -> str:
  """Usage of a launcher."""
  rows = []
  for name, option in {**own, **COMMON}.items():
    text = name if option.switch else f"{name} VALUE"
    default = "required" if option.required else f"default: {option.default}"
    note = "" if option.default is None and not option.required else f" ({default})"
    rows.append(f"  {text:24}{option.meaning}{note}")
  return "\n".join(
    [
      f"python -m launch {launcher} --config FILE.py[:variant] --workdir DIR [...]",
      "",
      *rows,
      "",
      "--allow-change and --config.KEY=VALUE go to the training program.",
    ]
  )


def _split(argv: Sequence[str], known: Mapping[str, Option]) -> tuple[dict[str, str], list[str]]:
  """The launcher's own arguments, as --name=value or --name value, and all others."""
  given, training = {}, []
  words = list(argv)
  while words:
    word = words.pop(0)
    name, equals, value = word.partition("=")
    if name not in known:
      training.append(word)
    elif known[name].switch:
      given[name] = value or "yes"
    else:
      if not equals and words and not words[0].startswith("--"):
        value = words.pop(0)
      given[name] = value
  return given, training


def _with_launchers_names(known: Mapping[str, Option]):
  """A sentence about an argument that neither knows, with the nearest of both."""

  def sentence(problem: str) -> str:
    name, found, _ = problem.partition(" is not an argument")
    every = (*known, *settings.ARGUMENTS, settings.ALLOW_CHANGE)
    near = difflib.get_close_matches(name, every, n=1) if found else []
    if not found or not near:
      return problem
    return f"{name} is not an argument; the nearest is {near[0]}."

  return sentence


def _name_of(workdir: str) -> str:
  last = workdir.rstrip("/").rpartition("/")[2].lower()
  return re.sub(r"[^a-z0-9]+", "-", last).strip("-")


def _name_problems(name: str | None, workdir: str) -> Iterator[str]:
  if not NAME.fullmatch(name or _name_of(workdir)):
    of = f"got {name}" if name else f"and {workdir} gives {_name_of(workdir) or 'none'}; add one"
    yield (
      "--name must be at most 40 lower-case letters, digits and hyphens, and begin with a letter, "
      f"{of}."
    )
