"""Where chats and tool traces come from: JSONL files, or the generated set of tool use."""

import dataclasses
import json
import pathlib
from typing import NamedTuple

from data.chat.messages import Chat
from data.chat.record import RecordError, chat_of
from data.chat.render import render
from data.chat.tool_traces import DEFAULT_CHATS, tool_traces
from data.errors import RequestError
from data.prepare.sources import record_files

CHAT_KINDS = "jsonl:PATH, tools:SEED or tools:SEED:CHATS"
LISTED_PROBLEMS = 100  # that are written out; the others are counted


class Trace(NamedTuple):
  key: str  # FILE:LINE, as in sources.py, or the number of a generated chat
  chat: Chat


def read_traces(source: str) -> list[Trace]:
  """All chats of `source`.

  Raises: RequestError with file, line and reason of everything that is no chat.
  """
  kind, _, rest = source.partition(":")
  if kind == "tools":
    seed, _, chats = rest.partition(":")
    if seed.isdecimal() and (chats or "1").isdecimal():
      generated = tool_traces(int(seed), int(chats or DEFAULT_CHATS))
      return [Trace(f"tools:{int(seed)}#{number}", chat) for number, chat in enumerate(generated)]
  if kind == "jsonl" and rest:
    if not pathlib.Path(rest).exists():
      raise RequestError(f"--source is {source!r}, but {rest} does not exist.")
    return _read_jsonl(pathlib.Path(rest))
  raise RequestError(f"--source is {source!r}, accepted with --format chat are {CHAT_KINDS}.")


def identity(chat: Chat) -> str:
  """The same text for equal chats, different texts for others."""
  return json.dumps(dataclasses.asdict(chat), ensure_ascii=False)


def texts_of(chat: Chat) -> list[str]:
  """What a tokenizer is trained on: the text of a chat between its marks."""
  return [piece for piece in render(chat).pieces() if isinstance(piece, str)]


def _read_jsonl(root: pathlib.Path) -> list[Trace]:
  traces, problems = [], []
  for name, path in record_files(root, ".jsonl"):
    with path.open("rb") as lines:
      for number, line in enumerate(lines, 1):
        if not line.strip():
          continue
        try:
          traces.append(Trace(f"{name}:{number}", _chat(line)))
        except RecordError as error:
          problems += [f"Line {number} of {path} {reason}." for reason in error.problems]
  if problems:
    more = len(problems) - LISTED_PROBLEMS
    rest = [f"There are {more} more such problems."] if more > 0 else []
    raise RequestError(*problems[:LISTED_PROBLEMS], *rest)
  return traces


def _chat(line: bytes) -> Chat:
  try:
    return chat_of(json.loads(line))
  except RecordError:
    raise
  except ValueError as error:
    raise RecordError([f"is not JSON ({error})"]) from None
  except RecursionError:
    raise RecordError(["is nested too deeply"]) from None
