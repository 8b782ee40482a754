"""Which of several continuations a model holds to be the likeliest.

A line of the file: {"context": text, "choices": [text, ...], "answer": number of the right one}.
The choices follow the context as they are written, with their own spaces.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from train.evaluation.continuations import continuations
from train.evaluation.jsonl import Field, are_some_texts, is_text, read_problems
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.shares import share
from train.evaluation.task import Log, Metrics, Task

_FIELDS = {
  "context": Field("text", is_text),
  "choices": Field("a list of texts that are not empty", are_some_texts),
  "answer": Field("the number of a choice, from 0", lambda v: type(v) is int and v >= 0),
}


def make(name: str, file: str, request: Request) -> Task:
  """Accuracy by the sum of a choice's log-probabilities, and by that sum over its bytes."""
  del request
  problems = read_problems(name, file, _FIELDS, _check)
  run = lambda model, request, log: _run(problems.records[: request.limit], model, log)
  metrics = ("accuracy", "accuracy_per_byte")
  return Task(name, (*metrics, "problems"), run, source=problems.sha256)


def _check(record: Mapping[str, Any]) -> str | None:
  choices = record["choices"]
  if len(set(choices)) < max(2, len(choices)):
    return "choices must be two or more, each another one"
  if record["answer"] >= len(choices):
    return f"answer is {record['answer']}, but the last choice is {len(choices) - 1}"
  return None


def _run(records: list[dict[str, Any]], model: EvaluatedModel, log: Log) -> Metrics:
  asked = [continuations(model, r["context"], r["choices"]) for r in records]
  likelihoods = iter(model.log_likelihoods([one for choices in asked for one in choices]))
  right, right_per_byte = [], []
  for number, record in enumerate(records):
    totals = np.array([next(likelihoods).total for _ in record["choices"]])
    sizes = np.array([len(choice.encode()) for choice in record["choices"]])
    chosen, chosen_per_byte = int(np.argmax(totals)), int(np.argmax(totals / sizes))
    right.append(chosen == record["answer"])
    right_per_byte.append(chosen_per_byte == record["answer"])
    log(
      {
        "problem": number,
        **{name: record[name] for name in _FIELDS},
        "log_likelihoods": totals.tolist(),
        "chosen": chosen,
        "chosen_per_byte": chosen_per_byte,
      }
    )
  found = share("accuracy", right) | share("accuracy_per_byte", right_per_byte)
  return found | {"problems": float(len(records))}
