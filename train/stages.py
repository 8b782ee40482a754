"""The stages of a run: read from a configuration, laid over one another, counted in steps.

A stage begins at a number of tokens and changes a few keys; the others keep the values that they
had in the stage before it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from configs.schema import Settings, Stage
from data.pipeline import rows_of_folders
from deepseek_jax.optim.schedule import Span
from train.errors import hint
from train.keys import KEYS, convert, flatten, from_text, nest, unknown_key

PREFIX = "stages."  # of the keys stages.NAME.KEY
FIRST = "start"  # the part that the other keys describe

# Keys, and sections with all their keys, that neither add, remove nor reshape a parameter.
CHANGEABLE = (
  "data.slots",
  "data.batch_rows",
  "data.paths",
  "data.weights",
  "data.replay",
  "accumulation",
  "mesh",
  "objective.balance_weight",
  "objective.indexer",
  "objective.indexer_weight",
  "optim.bias_speed",
  "optim.frozen",
  "model.indexer.pool_source",
  "model.numerics.main_fp4",
  "model.numerics.window_fp8",
  "model.numerics.indexer_fp4",
  "model.numerics.experts_fp4",
)


class RunStage(NamedTuple):
  """A stage with everything that holds in it."""

  name: str
  settings: Settings  # without stages
  tokens: int  # of the run when it begins: those of whole steps
  first_step: int
  last_step: int

  @property
  def span(self) -> Span:
    return Span(self.last_step - self.first_step + 1, tokens_per_step(self.settings))


def tokens_per_step(settings: Settings) -> int:
  return settings.data.batch_rows * settings.data.slots


def layered(settings: Settings) -> list[tuple[str, Settings]]:
  """Name and settings of every stage, the first one included."""
  flat = flatten(dataclasses.asdict(settings)) | {"stages": ()}
  found = [(FIRST, Settings.from_dict(nest(flat)))]
  for stage in settings.stages:
    flat |= stage.changes
    found.append((stage.name, Settings.from_dict(nest(flat))))
  return found


def resolve(settings: Settings) -> tuple[RunStage, ...]:
  """The stages in order; together they take the steps 1 ... total_steps.

  Args:
    settings: sound, or with no fault but in `order_problems`.
  """
  parts, found = layered(settings), []
  first_step, tokens = 1, 0
  begins = [*(stage.tokens for stage in settings.stages), None]
  for (name, given), next_begin in zip(parts, begins, strict=True):
    last_step = settings.total_steps
    if next_begin is not None:  # a started step is finished first
      last_step = first_step - 1 - (tokens - next_begin) // tokens_per_step(given)
    found.append(RunStage(name, given, tokens, first_step, last_step))
    tokens += found[-1].span.updates * found[-1].span.tokens
    first_step = last_step + 1
  return tuple(found)


def spans(settings: Settings) -> tuple[Span, ...]:
  """The updates of the whole run, for its learning rate."""
  return tuple(stage.span for stage in resolve(settings))


def stage_of(stages: Sequence[RunStage], step: int) -> RunStage:
  """The one that takes this step, from 1 on."""
  return next(stage for stage in stages if step <= stage.last_step)


def rows_before(stages: Sequence[RunStage], stage: RunStage) -> tuple[int, ...]:
  """How many rows of each folder of a stage the stages before it read."""
  read = dict.fromkeys(stage.settings.data.paths, 0)
  for earlier in stages[: stages.index(stage)]:
    data = earlier.settings.data
    rows = rows_of_folders(data, earlier.span.updates * data.batch_rows)
    for path, count in zip(data.paths, rows, strict=True):
      read[path] = read.get(path, 0) + count
  return tuple(read[path] for path in stage.settings.data.paths)


def read_stages(given: Any, overrides: Mapping[str, str]) -> tuple[tuple[Stage, ...], list[str]]:
  """Stages with typed changes, and every problem of their form.

  Args:
    given: what a configuration file or a command line has as `stages`.
    overrides: stages.NAME.KEY -> text, laid on top.
  """
  if not isinstance(given, list | tuple):
    return (), [f"stages must be a list of stages, got {given!r}."]
  found, problems = [], []
  for number, item in enumerate(given):
    fields = vars(item) if isinstance(item, Stage) else item
    if not _is_stage(fields):
      problems.append(
        f"stages, number {number + 1}, must be a mapping of name (a text without dots), tokens (an "
        f"integer) and changes (key: value), got {item!r}."
      )
      continue
    prefix = f"{PREFIX}{fields['name']}."
    own = {k.removeprefix(prefix): v for k, v in overrides.items() if k.startswith(prefix)}
    changes, said = _typed(prefix, fields["changes"], own)
    problems += said
    found.append(Stage(name=fields["name"], tokens=fields["tokens"], changes=changes))
  problems += _without_a_stage(overrides, [stage.name for stage in found])
  return tuple(found), problems


def _is_stage(fields: Any) -> bool:
  if not isinstance(fields, Mapping) or set(fields) != {"name", "tokens", "changes"}:
    return False
  name = fields["name"]
  right_name = isinstance(name, str) and name != "" and "." not in name
  return right_name and type(fields["tokens"]) is int and isinstance(fields["changes"], Mapping)


def _typed(
  prefix: str, changes: Mapping[str, Any], overrides: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
  typed, problems = {}, []
  texts = {k: from_text(KEYS[k], text) if k in KEYS else text for k, text in overrides.items()}
  for key, value in (dict(changes) | texts).items():
    if key not in KEYS:
      problems.append(f"{prefix}{key}: {unknown_key(key)}")
    elif not any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE):
      problems.append(
        f"{prefix}{key} cannot be set, {key} holds for the whole run; a stage may change "
        f"{', '.join(CHANGEABLE)}."
      )
    else:
      try:
        typed[key] = convert(KEYS[key], value)
      except TypeError as error:
        problems.append(f"{prefix}{key} {error}.")
  return typed, problems


def _without_a_stage(overrides: Mapping[str, str], names: Sequence[str]) -> Iterator[str]:
  for key in overrides:
    name = key.removeprefix(PREFIX).partition(".")[0]
    if name not in names:
      known = hint(name, names, ", ".join(names)) if names else "the configuration has none"
      yield f"{key} names the stage {name!r}; {known}."


def order_problems(settings: Settings) -> Iterator[str]:
  """What is wrong with names and beginnings of stages whose own settings are sound."""
  names = [FIRST, *(stage.name for stage in settings.stages)]
  if repeated := sorted({name for name in names if names.count(name) > 1}):
    yield f"stages must have names of their own, not {FIRST!r}; repeated is {', '.join(repeated)}."
  begins = [stage.tokens for stage in settings.stages]
  if begins != sorted(begins) or any(tokens < 1 for tokens in begins):
    yield f"stages must begin one after the other, at 1 token or later, got {begins}."
    return
  for stage in resolve(settings):
    if stage.first_step > settings.total_steps:
      yield (
        f"Stage {stage.name} begins after step {stage.first_step - 1:,}, at {stage.tokens:,} "
        f"tokens, but total_steps is {settings.total_steps:,}; --config.stages=() leaves all out."
      )
    elif stage.first_step > stage.last_step:
      yield f"Stage {stage.name} has no step: the next one begins at once."


def flat(settings: Settings) -> dict[str, Any]:
  """Dotted key -> value, with those of stages as stages.NAME.KEY."""
  values = flatten(dataclasses.asdict(settings))
  del values["stages"]
  for stage in settings.stages:
    values[f"{PREFIX}{stage.name}.tokens"] = stage.tokens
    values |= {f"{PREFIX}{stage.name}.{key}": value for key, value in stage.changes.items()}
  return values
