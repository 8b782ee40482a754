"""Tasks of lm-eval (extra `eval`): one of its own by name, or any by its YAML file.

A file whose dataset_path is json or csv and whose data_files are local needs no network.
"""

import hashlib
import importlib
import importlib.util
import json
import pathlib
from typing import Any

from train.errors import UsageError
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.task import Log, Metrics, Task

PACKAGE = "lm_eval"


def make(name: str, rest: str, request: Request) -> Task:
  """Metrics as lm-eval names them; "metric_filter" where a task has filters, and of a group of
  tasks "task.metric".
  """
  del request
  if importlib.util.find_spec(PACKAGE) is None:
    raise UsageError([f"--tasks {name} needs lm-eval: pip install 'deepseek_jax[eval]'."])
  parts = _load(name, rest)
  alone = len(parts) == 1
  metrics = [_name(part, m, f, alone) for part, task in parts.items() for m, f in _metrics(task)]
  asked = [[task.dump_config(), list(task.eval_docs)] for task in parts.values()]
  source = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
  run = lambda model, request, log: _run(parts, model, request, log)
  generates = any(task.OUTPUT_TYPE == "generate_until" for task in parts.values())
  problems = lambda model, request: model.generation_problems() if generates else []
  return Task(name, tuple(metrics), run, problems, source)


def _load(name: str, rest: str) -> dict[str, Any]:
  """lm-eval's tasks by name."""
  is_file = rest.endswith((".yaml", ".yml"))
  if is_file and not pathlib.Path(rest).is_file():
    raise UsageError([f"--tasks {name}: {rest} is no file."])
  try:
    manager = importlib.import_module(f"{PACKAGE}.tasks").TaskManager(include_defaults=not is_file)
    return manager.load(str(pathlib.Path(rest).absolute()) if is_file else rest)["tasks"]
  except Exception as error:  # noqa: BLE001, of many kinds: YAML, data sets, templates, network
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise UsageError([f"--tasks {name} cannot be loaded by lm-eval: {reason}"]) from None


def _metrics(task: Any) -> list[tuple[str, str]]:
  filters = [own["name"] for own in task.config.filter_list or ()] or ["none"]
  return [(metric, own) for metric in task.aggregation() for own in filters]


def _name(part: str, metric: str, filtered: str, alone: bool) -> str:
  behind = "" if filtered == "none" else f"_{filtered}"
  return f"{metric}{behind}" if alone else f"{part}.{metric}{behind}"


def _run(parts: dict[str, Any], model: EvaluatedModel, request: Request, log: Log) -> Metrics:
  from train.evaluation.lm_eval_model import LmEvalModel

  seeds = {f"{kind}_seed": request.seed for kind in ("random", "numpy_random", "fewshot_random")}
  found = importlib.import_module(PACKAGE).simple_evaluate(
    LmEvalModel(model), tasks=list(parts.values()), limit=request.limit, bootstrap_iters=0, **seeds
  )
  for part, samples in found["samples"].items():
    for sample in samples:
      log({"lm_eval": part, **json.loads(json.dumps(sample, default=str))})
  results = found["results"]
  return {
    _name(part, metric, own, len(parts) == 1): float(results[part][f"{metric},{own}"])
    for part, task in parts.items()
    for metric, own in _metrics(task)
  }
