"""Where text comes from: a stream of documents with a stable key each.

A key is the path of a file relative to its source (`json/decoder.py`), with the record's number
for files of records (`part.jsonl:17`). Split and order depend on keys only, never on where a
source lies on the machine.
"""

import json
import pathlib
import sysconfig
from collections.abc import Callable, Iterator
from typing import NamedTuple

from data.errors import RequestError

KINDS = "python-stdlib, folder:PATH, jsonl:PATH or parquet:PATH"
LISTED_PROBLEMS = 10  # bad records that are named; the others are counted


class SourceText(NamedTuple):
  key: str
  text: str | None  # None: not UTF-8 text


def read_source(source: str, text_field: str = "text") -> Iterator[SourceText]:
  """Documents of `source`, in the order of their files.

  Args:
    source: python-stdlib, folder:PATH, jsonl:PATH or parquet:PATH. PATH of the last two is a file
      or a folder of such files.
    text_field: key or column that holds the text in JSONL and Parquet.

  Raises: RequestError when the source does not exist, cannot be read or has no such field.
  """
  kind, _, path = source.partition(":")
  if kind == "python-stdlib" and not path:
    return _standard_library()
  readers: dict[str, Callable[[pathlib.Path], Iterator[SourceText]]] = {
    "folder": _folder,
    "jsonl": lambda root: _jsonl(root, text_field),
    "parquet": lambda root: _parquet(root, text_field),
  }
  if kind not in readers or not path:
    raise RequestError(f"--source is {source!r}, accepted are {KINDS}.")
  root = pathlib.Path(path)
  if not root.exists():
    raise RequestError(f"--source is {source!r}, but {path} does not exist.")
  if kind == "folder" and not root.is_dir():
    raise RequestError(f"--source is {source!r}, but {path} is not a folder.")
  return readers[kind](root)


def _standard_library() -> Iterator[SourceText]:
  """Python files of the running interpreter's standard library.

  Tests are left out, as many systems install Python without them and they hold deliberately broken
  files. So are the codecs of `encodings`: tables that a program wrote and that nearly repeat each
  other, so that copies of what is trained on would be validated on.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
  for path in sorted(root.rglob("*.py")):
    key = path.relative_to(root)
    if left_out.isdisjoint(key.parts):
      yield SourceText(key.as_posix(), _text_of(path))


def _folder(root: pathlib.Path) -> Iterator[SourceText]:
  """Every file below `root`, apart from hidden files and folders."""
  for path in sorted(root.rglob("*")):
    key = path.relative_to(root)
    if path.is_file() and not any(part.startswith(".") for part in key.parts):
      yield SourceText(key.as_posix(), _text_of(path))


def _text_of(path: pathlib.Path) -> str | None:
  try:
    text = path.read_bytes().decode("utf-8")
  except UnicodeDecodeError:
    return None
  return None if "\0" in text else text


def record_files(root: pathlib.Path, suffix: str) -> list[tuple[str, pathlib.Path]]:
  """Key and path of a file of records, or of every such file below a folder."""
  if root.is_file():
    return [(root.name, root)]
  found = sorted(root.rglob(f"*{suffix}"))
  if not found:
    raise RequestError(f"--source names {root}, which holds no {suffix} file.")
  return [(path.relative_to(root).as_posix(), path) for path in found]


def _jsonl(root: pathlib.Path, text_field: str) -> Iterator[SourceText]:
  problems = []
  for name, path in record_files(root, ".jsonl"):
    with path.open("rb") as lines:
      for number, line in enumerate(lines, 1):
        if not line.strip():
          continue
        text = _json_text(line, text_field)
        if text is None:
          problems.append(
            f"Line {number} of {path} is not a JSON object with text under {text_field!r}."
          )
          continue
        yield SourceText(f"{name}:{number}", text)
  if problems:
    more = len(problems) - LISTED_PROBLEMS
    rest = [f"{more} more lines have the same problem."] if more > 0 else []
    raise RequestError(*problems[:LISTED_PROBLEMS], *rest)


def _json_text(line: bytes, text_field: str) -> str | None:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  text = record.get(text_field) if isinstance(record, dict) else None
  return text if isinstance(text, str) else None


def _parquet(root: pathlib.Path, text_field: str) -> Iterator[SourceText]:
  try:
    import pyarrow
    from pyarrow import parquet
  except ModuleNotFoundError:
    raise RequestError("--source parquet: needs the package pyarrow; install it.") from None
  for name, path in record_files(root, ".parquet"):
    try:
      table = parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError):
      raise RequestError(f"{path} is not a readable Parquet file.") from None
    columns = table.schema_arrow.names
    if text_field not in columns:
      raise RequestError(
        f"--text-field is {text_field!r}, but the columns of {path} are {columns}."
      )
    number = 0
    for batch in table.iter_batches(columns=[text_field]):
      for text in batch.column(0).to_pylist():
        yield SourceText(f"{name}:{number}", text if isinstance(text, str) else None)
        number += 1
