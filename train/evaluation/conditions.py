"""`--fail-if 'task.metric > number'`: when an evaluation ends with exit code 1."""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from train.errors import hint

_COMPARISONS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_FORM = re.compile(r"\s*([^\s<>][^<>]*?)\s*(>=|<=|>|<)\s*([-+.\w]+)\s*")


class Condition(NamedTuple):
  metric: str  # "task.metric", or "metric" of the one task that has it
  comparison: str
  number: float

  def __str__(self) -> str:
    return f"{self.metric} {self.comparison} {self.number:g}"

  def holds(self, value: float) -> bool:
    """Also for a value that is no finite number: a model that gives none has failed."""
    return not math.isfinite(value) or _COMPARISONS[self.comparison](value, self.number)


def read_condition(text: str) -> Condition | str:
  """The condition, or a sentence about what is wrong with it."""
  found = _FORM.fullmatch(text)
  try:
    number = float(found[3]) if found else math.nan
  except ValueError:
    number = math.nan
  if found is None or not math.isfinite(number):
    return f"--fail-if is {text!r}, accepted is 'task.metric > number' with >, <, >= or <=."
  return Condition(found[1], found[2], number)


def problems(conditions: Sequence[Condition], metrics: Mapping[str, Sequence[str]]) -> list[str]:
  """What is wrong with conditions on tasks that have these metrics, in sentences."""
  found = []
  for condition in conditions:
    name, places = condition.metric, _places(condition.metric, metrics)
    if len(places) > 1:
      tasks = ", ".join(f"{task}.{metric}" for task, metric in places)
      found.append(f"--fail-if {name} may be each of {tasks}; name one of them.")
    if not places:
      whole = [f"{task}.{metric}" for task, own in metrics.items() for metric in own]
      short = {metric for own in metrics.values() for metric in own}
      known = hint(name, (*whole, *short), ", ".join(whole))
      found.append(f"--fail-if {name} is no metric of these tasks; {known}.")
  return found


def failed(conditions: Sequence[Condition], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """A sentence for each condition that holds.

  Args:
    conditions: without problems.
    results: metrics by task; those of tasks that have not run are not looked at.
  """
  sentences = []
  for condition in conditions:
    for task, metric in _places(condition.metric, results):
      value = results[task][metric]
      value = math.nan if value is None else float(value)
      if condition.holds(value):
        sentences.append(f"{task}.{metric} is {value:.6g}: --fail-if {condition} holds.")
  return sentences


def _places(name: str, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
  return [
    (task, metric)
    for task, own in metrics.items()
    for metric in own
    if name in (metric, f"{task}.{metric}")
  ]
