"""The numbers of metrics.jsonl as columns. Legend: N steps."""

import array
import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


class Columns(NamedTuple):
  """One row for each step, in order."""

  steps_N: np.ndarray  # int64, strictly rising
  values: dict[str, np.ndarray]  # name -> float64 [N], NaN where it is no finite number
  unreadable: int  # lines that are no metrics of a step
  torn: bool  # the last line is one of them: a run was killed while it wrote

  def get(self, name: str) -> np.ndarray:
    """float64 [N]; all NaN for a name that no line has."""
    return self.values.get(name, np.full(len(self.steps_N), np.nan))

  def has(self, name: str) -> bool:
    """Whether there is anything to draw."""
    return bool(np.isfinite(self.get(name)).any())

  def last(self, name: str) -> float | None:
    """The latest number."""
    finite = self.get(name)[np.isfinite(self.get(name))]
    return float(finite[-1]) if len(finite) else None

  def layers(self, name: str) -> dict[int, np.ndarray]:
    """The columns `name`_layer_N that hold anything, by N, in order."""
    names = [re.fullmatch(rf"{name}_layer_([0-9]{{1,4}})", key) for key in self.values]
    found = {
      int(match[1]): self.values[match[0]] for match in names if match and self.has(match[0])
    }
    return dict(sorted(found.items()))


def read_columns(lines: Iterable[bytes]) -> Columns:
  """Reads line by line, so that a long run takes 8 bytes for each number. Of two lines of one step
  the later one counts.
  """
  steps, unreadable, torn = array.array("q"), 0, False
  columns: dict[str, array.array] = {}
  for line in lines:
    record = _record(line)
    torn = record is None
    unreadable += torn
    if record is None:
      continue
    for name, value in record.items():
      if name != "step" and _is_number(value):
        if name not in columns:
          columns[name] = array.array("d", [math.nan]) * len(steps)
        columns[name].append(_finite(value))
    steps.append(record["step"])
    for column in columns.values():
      column.extend([math.nan] * (len(steps) - len(column)))
  all_steps = np.array(steps, np.int64)
  # The first of equal steps in reverse order is the last one that was written.
  steps_N, place = np.unique(all_steps[::-1], return_index=True)
  rows = len(all_steps) - 1 - place
  values = {name: np.array(column, np.float64)[rows] for name, column in columns.items()}
  return Columns(steps_N, values, unreadable, torn)


def _record(line: bytes) -> dict[str, Any] | None:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  step = record.get("step") if isinstance(record, dict) else None
  return record if type(step) is int and 0 <= step < 2**63 else None


def _is_number(value: Any) -> bool:
  return value is None or type(value) in (int, float)  # null is what a NaN is written as


def _finite(value: float | None) -> float:
  try:
    number = math.nan if value is None else float(value)
  except OverflowError:
    return math.nan
  return number if math.isfinite(number) else math.nan
