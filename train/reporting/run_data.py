"""What a run folder holds, as far as it can be read; what cannot is said in sentences."""

import json
import math
from typing import Any, NamedTuple

from configs.schema import Settings
from deepseek_jax.checkpoint import manifest
from deepseek_jax.sharding import MESH_AXES
from deepseek_jax.storage_path import StoragePath
from train import checks, events, metric_lines, stages
from train.errors import UsageError
from train.keys import KEYS, convert, flatten
from train.reporting.columns import Columns, read_columns
from train.settings import settings_from_json

CONFIG, ENVIRONMENT, START = "config.json", "environment.json", "start.json"
_LARGEST = 2**53  # of the integers that arithmetic on sizes takes
_SHOWN = 5  # steps that a sentence names


class RunData(NamedTuple):
  folder: StoragePath
  metrics: Columns
  settings: Settings | None  # sound ones
  config: dict[str, Any]  # dotted key -> value, as stored
  environment: dict[str, Any]
  start: dict[str, Any]
  restarts: list[int]  # steps after which the run was started again, in order
  borders: dict[int, str]  # last step before a stage -> the stage's name
  checkpoints: list[int]
  notes: list[str]  # what is missing or wrong


def read_run(folder: StoragePath) -> RunData:
  """Reads everything but the arrays. Raises UsageError for a folder that is none of a run."""
  notes: list[str] = []
  config = _json(folder, CONFIG, notes)
  metrics = _metrics(folder, notes)
  if not config and not len(metrics.steps_N):
    raise UsageError(
      [f"--workdir {folder} is no run folder: it has neither a {CONFIG} nor metrics of a step."]
    )
  settings = _settings(config, notes) if config else None
  environment, start = (_json(folder, name, notes) for name in (ENVIRONMENT, START))
  notes += _complaints(metrics, settings)
  return RunData(
    folder,
    metrics,
    settings,
    flatten(config),
    environment,
    start,
    _restarts(folder, notes),
    _borders(settings, metrics),
    _checkpoints(folder, notes),
    notes,
  )


def _metrics(folder: StoragePath, notes: list[str]) -> Columns:
  try:
    metrics = read_columns(metric_lines.stored_lines(folder))
  except FileNotFoundError:
    metrics = read_columns([])
  except OSError as error:
    raise UsageError([f"{folder}: the metrics cannot be read: {error.strerror}."]) from None
  if not len(metrics.steps_N):
    notes.append("There are no metrics of a step yet, so nothing of the training can be drawn.")
  others = metrics.unreadable - metrics.torn
  if metrics.torn:
    notes.append("The last line of the metrics is incomplete and was left out.")
  if others:
    notes.append(f"{others:,} lines of the metrics are no JSON of a step and were left out.")
  return metrics


def _json(folder: StoragePath, name: str, notes: list[str]) -> dict[str, Any]:
  try:
    values = json.loads((folder / name).read_text(encoding="utf-8"))
  except FileNotFoundError:
    notes.append(f"The folder has no {name}.")
    return {}
  except (OSError, ValueError, RecursionError) as error:
    notes.append(f"{name} cannot be read ({getattr(error, 'strerror', None) or 'no JSON'}).")
    return {}
  if not isinstance(values, dict):
    notes.append(f"{name} holds no JSON object.")
    return {}
  return values


def _settings(config: dict[str, Any], notes: list[str]) -> Settings | None:
  """None, and a sentence, for a configuration that this version does not take."""
  try:
    settings = settings_from_json(json.dumps(config))
    values = flatten(json.loads(json.dumps(config)))
    for key, value in values.items():
      if key != "stages":
        convert(KEYS[key], value)
      if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError(f"{key} is {value}")
    devices = math.prod(getattr(settings.mesh, axis) for axis in MESH_AXES)
    problems = checks.problems(settings, devices=devices, reads_data=False)
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    problems = [str(error)]
  if not problems:
    return settings
  notes.append(
    f"{CONFIG} is no configuration that this version runs ({problems[0].rstrip('.')}), so "
    "stages, cache and FLOPs are left out."
  )
  return None


def _complaints(metrics: Columns, settings: Settings | None) -> list[str]:
  """What the numbers themselves say is wrong or missing."""
  if not len(metrics.steps_N):
    return []
  said = []
  lost = metrics.steps_N[~(metrics.get("loss") == metrics.get("loss"))]
  if len(lost):
    named = ", ".join(f"{step:,}" for step in lost[:_SHOWN])
    more = f" and {len(lost) - _SHOWN:,} more" if len(lost) > _SHOWN else ""
    noun = "step" if len(lost) == 1 else "steps"
    said.append(f"The loss is not finite in {len(lost):,} {noun}: {named}{more}.")
  first, last, count = int(metrics.steps_N[0]), int(metrics.steps_N[-1]), len(metrics.steps_N)
  if last - first + 1 != count:
    said.append(f"{last - first + 1 - count:,} steps between {first:,} and {last:,} have no line.")
  if not metrics.layers("router_imbalance"):
    said.append(
      "The metrics have no load of experts by layer, so there is no map of it; a run with "
      "log.observed_queries above 0 writes it."
    )
  if settings is not None and last < settings.total_steps:
    said.append(f"The run has taken {last:,} of its {settings.total_steps:,} steps.")
  return said


def _restarts(folder: StoragePath, notes: list[str]) -> list[int]:
  try:
    starts = events.read_starts(folder)
  except OSError as error:
    notes.append(f"Restarts are not marked: the events cannot be read ({error.strerror}).")
    return []
  if not starts:
    notes.append("Restarts are not marked: the folder has no events of a start.")
  return [step for step in starts if step > 0]


def _borders(settings: Settings | None, metrics: Columns) -> dict[int, str]:
  if settings is None or not len(metrics.steps_N):
    return {}
  later = stages.resolve(settings)[1:]
  reached = [stage for stage in later if stage.first_step <= metrics.steps_N[-1]]
  return {stage.first_step - 1: stage.name for stage in reached}


def _checkpoints(folder: StoragePath, notes: list[str]) -> list[int]:
  try:
    return manifest.complete_steps(folder / "checkpoints")
  except OSError as error:
    notes.append(f"The checkpoints cannot be listed ({error.strerror}).")
    return []
