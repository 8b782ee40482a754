"""results.json: what was measured, one record for each checkpoint; and samples.jsonl.

A record is written anew after every task, in one step, so that an evaluation which was interrupted
goes on with the next one. Of several processes only the first reads and writes the files.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_jax.storage_path import StoragePath, storage_path, write_atomically
from train import processes
from train.environment import environment
from train.errors import UsageError
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.task import Metrics, Task

_FIELDS = {
  "checkpoint": str,
  "checkpoint_sha256": str,
  "settings": dict,
  "versions": dict,
  "sources": dict,
  "results": dict,
}

_OWNER = ("checkpoint_sha256", "step")  # of a sample, beside its task


class Results:
  """The records of a file; without one they are in memory alone."""

  def __init__(self, file: str | None) -> None:
    """Reads what is there. Raises UsageError for a file that is none of ours."""
    self._path = None if file is None else storage_path(file)
    self.records: list[dict[str, Any]] = [] if self._path is None else _read(self._path)

  def share(self) -> None:
    """From now on all processes go by what the first one has read; they have to call this."""
    ((text,), *_) = processes.gather([json.dumps(self.records)])
    self.records = json.loads(text)

  def record(self, model: EvaluatedModel, request: Request) -> dict[str, Any]:
    """The record of a checkpoint, which is made if there is none yet.

    Raises: UsageError where the file has results that were made with other settings.
    """
    made = _new_record(model, request)
    sha256 = made["checkpoint_sha256"]
    problems = []
    for record in self.records:
      problems += _differences(record["settings"], made["settings"])
      if record["checkpoint_sha256"] == sha256:
        problems += _differences(record["versions"], made["versions"])
        made = record
    if problems:
      advice = "Name another --output; this one is left as it is."
      raise UsageError([f"{self._path}: {p}" for p in dict.fromkeys(problems)] + [advice])
    if made not in self.records:
      self.records.append(made)
    return made

  def done(self, record: dict[str, Any], task: Task) -> bool:
    """Whether the record has the task. Raises UsageError if that is about another source."""
    if task.name not in record["results"]:
      return False
    if (before := record["sources"].get(task.name, "")) != task.source:
      raise UsageError(
        [
          f"{self._path} has results of {task.name} that are of another file, or of programs that "
          f"were run otherwise ({before or 'none'}, now {task.source or 'none'}); name another "
          "--output."
        ]
      )
    return True

  def add(self, record: dict[str, Any], task: Task, metrics: Metrics) -> None:
    """Writes the metrics of a task. Raises UsageError if the file cannot be written."""
    record["results"][task.name] = {name: _plain(value) for name, value in metrics.items()}
    if task.source:
      record["sources"][task.name] = task.source
    if self._path is not None:
      ordered = sorted(self.records, key=lambda r: -1 if r["step"] is None else r["step"])
      _write("--output", self._path, json.dumps(ordered, indent=1, allow_nan=False) + "\n")


class Samples:
  """samples.jsonl: the lines of a task replace those that an interrupted evaluation left."""

  def __init__(self, file: str | None) -> None:
    """Raises UsageError for a file that is none of ours."""
    self._path = None if file is None else storage_path(file)
    if self._path is not None:
      self._lines()

  def write(self, record: Mapping[str, Any], task: Task, samples: Sequence[Mapping]) -> None:
    """Puts the samples of a task of a record behind all others."""
    if self._path is None:
      return
    own = {name: record[name] for name in _OWNER} | {"task": task.name}
    kept = [line for line in self._lines() if any(line[key] != own[key] for key in own)]
    lines = [*kept, *({**own, **sample} for sample in samples)]
    text = "".join(json.dumps(_plain(line), ensure_ascii=False) + "\n" for line in lines)
    _write("--log-samples", self._path, text)

  def _lines(self) -> list[dict[str, Any]]:
    assert self._path is not None
    text = _text("--log-samples", self._path)
    try:
      lines = [json.loads(line) for line in text.split("\n") if line]  # text may hold U+2028
      if all(name in line for line in lines for name in (*_OWNER, "task")):
        return lines
    except (ValueError, TypeError):
      pass
    raise UsageError([f"--log-samples {self._path} is there and holds no samples of evaluate."])


def _new_record(model: EvaluatedModel, request: Request) -> dict[str, Any]:
  found = environment()
  data = {"data": [prepared.fingerprint for prepared in model.data]}
  return {
    "checkpoint": str(model.checkpoint.path),
    "step": model.checkpoint.step,
    "checkpoint_sha256": model.sha256,
    "config": dataclasses.asdict(model.settings),
    "settings": request.decides() | data,
    "versions": found["versions"] | {"git": found["git"]["revision"]},
    "sources": {},
    "results": {},
  }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  now = json.loads(json.dumps(now))
  return [
    f"{key} was {before.get(key)} and is now {now.get(key)}."
    for key in dict.fromkeys((*before, *now))
    if before.get(key) != now.get(key)
  ]


def _read(path: StoragePath) -> list[dict[str, Any]]:
  text = _text("--output", path)
  if not text:
    return []
  try:
    records = json.loads(text)
    whole = all(isinstance(r[name], kind) for r in records for name, kind in _FIELDS.items())
    if isinstance(records, list) and whole:
      return records
  except (ValueError, KeyError, TypeError):
    pass
  raise UsageError([f"--output {path} is there and holds no results of evaluate."])


def _text(name: str, path: StoragePath) -> str:
  """Of a file, "" if there is none. Raises UsageError where it can be neither read nor written."""
  if not processes.first():
    return ""
  try:
    return path.read_text(encoding="utf-8")
  except FileNotFoundError:
    if isinstance(path, pathlib.Path) and not os.access(path.absolute().parent, os.W_OK):
      raise UsageError([f"{name} {path} cannot be written: no such folder to write to."]) from None
    return ""
  except UnicodeDecodeError:
    raise UsageError([f"{name} {path} is there and is no text."]) from None
  except OSError as error:
    raise UsageError([f"{name} {path} cannot be read: {error.strerror}."]) from None


def _write(name: str, path: StoragePath, text: str) -> None:
  if not processes.first():
    return
  try:
    write_atomically(path, text.encode())
  except OSError as error:
    raise UsageError([f"{name} {path} cannot be written: {error.strerror}."]) from None


def _plain(value: Any) -> Any:
  """As JSON has it: numbers that are not finite are null."""
  if isinstance(value, Mapping):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if hasattr(value, "item"):
    value = value.item()
  return None if isinstance(value, float) and not math.isfinite(value) else value
