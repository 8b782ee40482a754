"""Problems of a task out of a JSONL file, with everything that is wrong with it at once."""

import gzip
import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.errors import UsageError

LISTED = 10  # problems that are named; the others are counted


class Field(NamedTuple):
  accepted: str  # in words
  accepts: Callable[[Any], bool]
  needed: bool = True


Fields = Mapping[str, Field]
Check = Callable[[Mapping[str, Any]], str | None]  # of a record whose fields are sound


class Problems(NamedTuple):
  records: list[dict[str, Any]]
  sha256: str  # of the file


def is_text(value: Any) -> bool:
  return isinstance(value, str)


def is_some_text(value: Any) -> bool:
  return isinstance(value, str) and value != ""


def are_some_texts(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(map(is_some_text, value))


def is_count(value: Any) -> bool:
  return type(value) is int and value >= 1


def read_problems(
  task: str, file: str, fields: Fields, check: Check = lambda record: None
) -> Problems:
  """Every record of a file, which may be compressed (.gz). Empty lines are skipped.

  Args:
    task: that the file was given to.
    file: local path.
    fields: names and what they may hold; others are left alone.
    check: what a record has to be beside its fields: None, or the end of a sentence.

  Raises: UsageError for a file that cannot be read, and with file, line and reason for each line
    that is no record.
  """
  path = pathlib.Path(file)
  try:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
  except (OSError, EOFError, zlib.error) as error:
    reason = getattr(error, "strerror", None) or error
    raise UsageError([f"--tasks {task}: {file} cannot be read: {reason}."]) from None
  records, found = [], []
  for number, line in enumerate(text.splitlines(), 1):
    if not line.strip():
      continue
    record, problem = _record(line, fields, check)
    records.append(record)
    if problem:
      found.append(f"{file}, line {number}: {problem}.")
  if not records:
    found.append(f"{file} holds no problem.")
  if found:
    more = len(found) - LISTED
    raise UsageError(found[:LISTED] + ([f"{more} more lines of {file}."] if more > 0 else []))
  return Problems(records, hashlib.sha256(data).hexdigest())


def _record(line: bytes, fields: Fields, check: Check) -> tuple[dict[str, Any], str | None]:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    return {}, f"it is no JSON ({error})"
  if not isinstance(record, dict):
    return {}, "it is no JSON object"
  if _is_broken(record):
    return {}, "it holds half of a surrogate pair, which is no text"
  wrong = []
  for name, field in fields.items():
    if name not in record:
      wrong += [f"{name} is missing"] if field.needed else []
    elif not field.accepts(record[name]):
      wrong.append(f"{name} must be {field.accepted}, got {_short(record[name])}")
  return record, "; ".join(wrong) or check(record)


def _is_broken(record: dict[str, Any]) -> bool:
  try:
    json.dumps(record, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return True
  return False


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 40 else f"{text[:37]}..."
