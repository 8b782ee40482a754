"""Tasks that look inside: what the indexers' choices catch, and how tokens spread over experts.

Legend: E experts.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from data.source import Row
from deepseek_jax.config import ModelConfig
from deepseek_jax.model import Model
from deepseek_jax.nn.health import COLLECTION
from deepseek_jax.objective.health import health_metrics
from deepseek_jax.objective.layer_values import by_layer
from deepseek_jax.sharding import to_host
from train.evaluation.agreement import place
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.served_rows import held_out_rows
from train.evaluation.serving import data_problems, exact_rows
from train.evaluation.task import Log, Metrics, Task

QUERIES = 16  # of a row, evenly spaced: as many as a run looks at unless told otherwise


def recall(name: str, rest: str, request: Request) -> Task:
  """Of the attention on all visible entries the share that falls on the chosen ones ("recall") and
  on the candidate pool ("pool_recall"), of every layer with entries; see ops/attention_mass.py.
  """
  del rest, request
  return Task(name, ("recall", "worst_recall", "sink_mass", "window_mass"), _recall, data_problems)


def _recall(model: EvaluatedModel, request: Request, log: Log) -> Metrics:
  del log
  return recall_of(model, held_out_rows(model.data, request.limit))


def recall_of(model: EvaluatedModel, rows: Iterable[Row]) -> Metrics:
  """Means over the queries of rows that are looked at."""
  found = health_metrics(_total(model, rows, lambda health, layers: health))
  metrics: dict[str, Any] = {
    name: float(found[name])
    for name in ("recall", "pool_recall", "sink_mass", "window_mass")
    if name in found
  }
  for name in ("recall", "pool_recall"):
    layers = sorted(
      int(metric.removeprefix(f"{name}_layer_"))
      for metric in found
      if metric.startswith(f"{name}_layer_")
    )
    if layers:
      values = [float(found[f"{name}_layer_{layer}"]) for layer in layers]
      metrics |= {f"worst_{name}": min(values), f"{name}_by_layer": values}
      metrics[f"{name}_layers"] = layers
  return metrics


def experts(name: str, rest: str, request: Request) -> Task:
  """How often each expert is chosen, over the mean of its layer.

  "imbalance" is the largest load over the mean, "entropy" the smallest over the largest there is,
  "unused" the number of experts that no token chose; the first two are of the worst layer.
  """
  del rest, request
  return Task(name, ("imbalance", "entropy", "unused"), _experts, data_problems)


def _experts(model: EvaluatedModel, request: Request, log: Log) -> Metrics:
  del log
  rows = held_out_rows(model.data, request.limit)
  loads = by_layer(_total(model, rows, lambda health, layers: layers))
  load_LE = np.array([aux.load_text_E + aux.load_vision_E for aux in loads.values()], np.float64)
  share_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
  logs_LE = np.log(np.where(share_LE > 0, share_LE, 1))
  entropy_L = -np.sum(share_LE * logs_LE, axis=1) / np.log(share_LE.shape[1])
  load_LE = share_LE * share_LE.shape[1]
  return {
    "imbalance": float(load_LE.max()),
    "entropy": float(entropy_L.min()),
    "unused": float(np.sum(load_LE == 0)),
    "layers": list(loads),
    "experts": list(range(share_LE.shape[1])),
    "load": load_LE.tolist(),
    "entropy_by_layer": entropy_L.tolist(),
  }


def _total(model: EvaluatedModel, rows: Iterable[Row], part: Callable[[Any, Any], Any]) -> Any:
  """What the layers report of all rows, added up; NumPy."""
  program, total = _reports_program(model.cfg), None
  for layout, _ in exact_rows(model, rows):
    with jax.set_mesh(model.mesh):
      found = to_host(part(*program(model.variables, place(model, layout))))
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    total = found if total is None else jax.tree.map(np.add, total, found)
  return total


@functools.lru_cache(maxsize=2)
def _reports_program(cfg: ModelConfig) -> Any:
  """(variables, layout) -> what nn/health.py collects, and LayerAux of every layer."""
  model: Any = Model(cfg, observed_queries=QUERIES)

  def reports(variables: Any, layout: Any) -> tuple[Any, Any]:
    output, left = model.apply(variables, layout, mutable=[COLLECTION])
    return left[COLLECTION], output.layers

  return jax.jit(reports)
