"""The result files of `evaluate`: records of checkpoints, as tables and heat maps."""

import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepseek_jax.storage_path import storage_path
from train.errors import UsageError

# The axes of the tables in a task's metrics, as they are nested: table[first][second].
_AXES = (("lengths", "depths"), ("layers", "experts"))
_ALONG = ("distance", "position")  # tokens at which the stretches of METRIC_by_distance begin
_COUNTS = "tokens"  # of a stretch


class Axis(NamedTuple):
  name: str
  values: list[float]


class HeatMap(NamedTuple):
  """A table of a task. Legend: R rows, C columns."""

  task: str
  metric: str
  source: str  # of the record, in words
  rows: Axis
  columns: Axis
  cells_RC: np.ndarray  # float64, NaN where nothing was measured

  @property
  def slug(self) -> str:
    """Its names as a part of a file's."""
    return re.sub(r"[^a-z0-9]+", "_", f"{self.task}_{self.metric}".lower())[:60].strip("_")


class Curve(NamedTuple):
  """A metric of a task by place in a text. Legend: K stretches."""

  task: str
  metric: str
  source: str
  along: str  # one of _ALONG
  starts_K: list[float]  # tokens
  values_K: np.ndarray  # float64, NaN where nothing was measured


class Results(NamedTuple):
  sources: list[str]  # of each column: a checkpoint, and a file where it has a task again
  numbers: dict[str, list[Any]]  # "task.metric" -> a value for each column, None for none
  maps: list[HeatMap]
  curves: list[Curve]


def read_results(paths: Sequence[str]) -> Results:
  """Raises UsageError that names every file which is no result."""
  found, problems = [], []
  for path in paths:
    try:
      records = json.loads(storage_path(path).read_text(encoding="utf-8"))
      records = records if isinstance(records, list) else [records]
      if not all(isinstance(r, dict) and isinstance(r.get("results"), dict) for r in records):
        raise ValueError("a record without results")
      found += [(path, record) for record in records]
    except OSError as error:
      problems.append(f"--results {path} cannot be read: {error.strerror or error}.")
    except (ValueError, RecursionError):
      problems.append(f"--results {path} holds no results of evaluate.")
  if problems:
    raise UsageError(problems)
  return _arranged(found)


def _arranged(found: list[tuple[str, dict[str, Any]]]) -> Results:
  columns: list[tuple[str, dict[str, Any]]] = []
  for path, record in found:
    name, tasks = _name(record), record["results"]
    same = [column for source, column in columns if source == name]
    if same and not same[0].keys() & tasks.keys():
      same[0].update(tasks)  # other tasks of the checkpoint, from another file
    else:
      columns.append((f"{name} ({pathlib.PurePath(path).name})" if same else name, dict(tasks)))
  numbers: dict[str, list[Any]] = {}
  maps: list[HeatMap] = []
  curves: list[Curve] = []
  for place, (source, tasks) in enumerate(columns):
    for task, metrics in tasks.items():
      for name, value in _numbers(metrics):
        row = numbers.setdefault(f"{task}.{name}" if name else task, [None] * len(columns))
        row[place] = value
      maps += _maps(task, source, metrics)
      curves += _curves(task, source, metrics)
  by_task = sorted(maps, key=lambda found: (found.task, found.metric))  # checkpoints side by side
  return Results([source for source, _ in columns], numbers, by_task, curves)


def _name(record: Mapping[str, Any]) -> str:
  """A checkpoint in words: its step, or its folder where it has none."""
  step = record.get("step")
  if step is not None:
    return f"step {step:,}" if type(step) is int else f"step {step}"
  return str(record.get("checkpoint", "a checkpoint")).rstrip("/").rpartition("/")[2]


def _numbers(metrics: Any, name: str = "") -> Iterator[tuple[str, Any]]:
  """Dotted names, with everything that is no list."""
  if isinstance(metrics, dict):
    for key, inner in metrics.items():
      yield from _numbers(inner, f"{name}.{key}" if name else key)
  elif not isinstance(metrics, list):
    yield name, metrics


def _maps(task: str, source: str, metrics: Any, name: str = "") -> Iterator[HeatMap]:
  """Every table, also of a metric that is a mapping with axes of its own."""
  if not isinstance(metrics, dict):
    return
  for first, second in _AXES:
    axes = [_numeric(metrics.get(axis), 1) for axis in (first, second)]
    for key, value in metrics.items():
      cells = _numeric(value, 2)
      if cells is None or axes[0] is None or axes[1] is None:
        continue
      rows, columns = Axis(first, axes[0].tolist()), Axis(second, axes[1].tolist())
      if cells.shape == (len(columns.values), len(rows.values)) != cells.T.shape:
        cells = cells.T  # nested the other way round, which a square table does not tell
      if first == "lengths":  # the longer text to the right, the deeper place below
        rows, columns, cells = columns, rows, cells.T
      if cells.shape == (len(rows.values), len(columns.values)):
        yield HeatMap(task, f"{name}.{key}" if name else key, source, rows, columns, cells)
  for key, value in metrics.items():
    yield from _maps(task, source, value, f"{name}.{key}" if name else key)


def _curves(task: str, source: str, metrics: Any) -> Iterator[Curve]:
  if not isinstance(metrics, dict):
    return
  for along in _ALONG:
    starts_K = _numeric(metrics.get(along), 1)
    for key, value in metrics.items():
      metric, end = key.removesuffix(f"_by_{along}"), key.endswith(f"_by_{along}")
      values_K = _numeric(value, 1) if end and metric != _COUNTS else None
      if starts_K is None or values_K is None or starts_K.shape != values_K.shape:
        continue
      if np.isfinite(starts_K).all() and np.isfinite(values_K).any():
        yield Curve(task, metric, source, along, starts_K.tolist(), values_K)


def _numeric(value: Any, dimensions: int) -> np.ndarray | None:
  """A nested list of numbers that is not empty, with NaN for None."""
  if not isinstance(value, list):
    return None
  try:
    numbers = np.array(value, np.float64)
  except (ValueError, TypeError, OverflowError):
    return None
  return numbers if numbers.ndim == dimensions and numbers.size else None
