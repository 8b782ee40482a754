"""What a task is: a name, the metrics it gives, and how it measures them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request

Metrics = Mapping[str, float | list]  # a list holds a table, as a heat map; --fail-if takes floats
Log = Callable[[Mapping[str, Any]], None]  # takes a JSON-able record of a row or a problem


class Task(NamedTuple):
  name: str  # as it was asked for, such as multiple_choice:FILE
  metrics: tuple[str, ...]  # that `run` gives in any case; --fail-if knows these
  run: Callable[[EvaluatedModel, Request, Log], Metrics]
  problems: Callable[[EvaluatedModel, Request], list[str]] = lambda model, request: []
  source: str = ""  # hash of what it reads beside the model: results of another one are not kept
