"""Whether a model writes the answer that is asked for.

A line of the file: {"prompt": text, "answer": text or [text, ...]} and, if wanted, "stop": [text,
...] that end what is written (a new line) and "max_new_tokens" (32). Spaces around both are left
out of the comparison.
"""

from collections import defaultdict
from typing import Any

from train.evaluation.jsonl import (
  Field,
  are_some_texts,
  is_count,
  is_some_text,
  is_text,
  read_problems,
)
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.shares import share
from train.evaluation.task import Log, Metrics, Task

_STOP, _MAX_NEW_TOKENS = ["\n"], 32
_FIELDS = {
  "prompt": Field("text", is_text),
  "answer": Field("text or a list of texts", lambda v: is_some_text(v) or are_some_texts(v)),
  "stop": Field("a list of texts that are not empty", are_some_texts, needed=False),
  "max_new_tokens": Field("a number of tokens, at least 1", is_count, needed=False),
}


def make(name: str, file: str, request: Request) -> Task:
  """The share of problems whose likeliest continuation, token by token, is an answer."""
  del request
  problems = read_problems(name, file, _FIELDS)
  run = lambda model, request, log: _run(problems.records[: request.limit], model, log)
  return Task(
    name,
    ("exact_match", "problems"),
    run,
    lambda model, request: model.generation_problems(),
    problems.sha256,
  )


def _run(records: list[dict[str, Any]], model: EvaluatedModel, log: Log) -> Metrics:
  alike = defaultdict(list)  # (stop, tokens) -> numbers of problems
  for number, record in enumerate(records):
    stop = tuple(record.get("stop", _STOP))
    alike[stop, record.get("max_new_tokens", _MAX_NEW_TOKENS)].append(number)
  written = {}
  for (stop, tokens), numbers in alike.items():
    prompts = [model.encode(records[n]["prompt"]) for n in numbers]
    texts = model.generate(prompts, tokens, stop)
    written |= dict(zip(numbers, texts, strict=True))
  right = []
  for number, record in enumerate(records):
    answers = record["answer"] if isinstance(record["answer"], list) else [record["answer"]]
    right.append(written[number].strip() in [answer.strip() for answer in answers])
    log(
      {
        "problem": number,
        "prompt": record["prompt"],
        "answer": record["answer"],
        "written": written[number],
        "right": right[-1],
      }
    )
  return share("exact_match", right) | {"problems": float(len(records))}
