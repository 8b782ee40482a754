"""`generate --chat`: what is asked as a chat, and the answer as it comes.

A chat is written by data/chat/render.py: text of messages never becomes a mark.
"""

import json
import pathlib
import re
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from data.chat.markup import BLANK_LINE, Mark
from data.chat.messages import Chat, Message
from data.chat.parse import ChatError, parse_answer
from data.chat.record import RecordError, chat_of
from data.chat.render import prompt
from data.chat.tokens import ChatTokenizer
from data.chat.views import shown
from train.errors import UsageError

_JSON = re.compile(r'\s*(\[\s*\{|\{\s*")')  # how a list of messages begins, and a record
_FILE = re.compile(r"\S+\.json")
_OPENING = f"{BLANK_LINE}<"  # of the first tag of calls, before its mark
REASONING, ANSWER = "[reasoning]\n", "\n[answer]\n"  # printed before each where there are both


def read_chat(text: str, effort: int | None) -> Chat:
  """The chat that --prompt and --effort mean.

  Args:
    text: a user message; messages or a record as data/chat/record.py has them; NAME.json with
      one of these.
    effort: 1 to 100; None leaves it to the record, and thinking off where that says nothing.

  Raises: UsageError with every problem, also for a chat that ends with an answer.
  """
  record = _record(text)
  known = record.get("reasoning_effort")
  problems = []
  if effort is not None and known not in (None, effort):
    problems.append(f"--effort is {effort}, but --prompt has the reasoning_effort {known}.")
  elif effort is not None:
    record["reasoning_effort"] = effort
  try:
    chat = chat_of(record)
  except RecordError as error:
    raise UsageError([*problems, *(f"--prompt {problem}." for problem in error.problems)]) from None
  if chat.messages[-1].role == "assistant":
    problems.append("--prompt ends with an answer; the last message must be one to be answered.")
  if problems:
    raise UsageError(problems)
  return chat


def _record(text: str) -> dict[str, Any]:
  if _FILE.fullmatch(text):
    try:
      content = pathlib.Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
      reason = error.strerror if isinstance(error, OSError) else "it is no text"
      raise UsageError([f"--prompt {text} cannot be read: {reason}."]) from None
  elif _JSON.match(text):
    content = text
  else:
    return {"messages": [{"role": "user", "content": text}]}
  try:
    values = json.loads(content)
  except (ValueError, RecursionError) as error:
    raise UsageError([f"--prompt {text[:40]} is no JSON: {error}."]) from None
  return dict(values) if isinstance(values, dict) else {"messages": values}


def chat_tokens(encoder: ChatTokenizer, chat: Chat) -> np.ndarray:
  """[n] int32 tokens up to where the model answers."""
  return encoder.encode(prompt(shown(chat)))


class Answer:
  """An answer as its tokens come: what is to be shown of each, and at the end the message."""

  def __init__(self, encoder: ChatTokenizer, *, thinking: bool) -> None:
    self._encoder, self._thinking = encoder, thinking
    self._marks = {number: mark for mark, number in encoder.ids.items()}
    self._tokens: list[int] = []
    self._stream = DecodeStream(skip_special_tokens=False)
    self._held = ""  # text that may open calls
    self._calls = False  # since a DSML mark: calls are shown as a whole

  def begin(self) -> str:
    return REASONING if self._thinking else ""

  def add(self, token: int) -> str:
    """What to show of the next token."""
    self._tokens.append(token)
    mark = self._marks.get(token)
    if mark is None:
      piece = self._stream.step(self._encoder.tokenizer, token) or ""
      return "" if self._calls else self._free(self._held + piece)
    self._stream = DecodeStream(skip_special_tokens=False)
    text, self._held = self._held, ""
    if mark is Mark.DSML:
      self._calls = True
      return text.removesuffix(_OPENING)
    return text + (ANSWER if mark is Mark.THINK_END and self._thinking else "")

  def _free(self, text: str) -> str:
    """The text without an end that may be the opening of calls, which is held back."""
    openings = (_OPENING[:size] for size in range(len(_OPENING), 0, -1))
    self._held = next((opening for opening in openings if text.endswith(opening)), "")
    return text.removesuffix(self._held)

  def message(self) -> Message:
    """The answer as it was meant. Raises ChatError where it is none in the released format."""
    return parse_answer(self._encoder.decode(self._tokens), thinking=self._thinking)

  def end(self) -> str:
    """What to show behind the last token: calls, or why there is no whole answer."""
    try:
      calls = self.message().calls
    except ChatError as error:
      return f"{self._held}\n[not a whole answer: {error}]"
    line = lambda call: f"\n[call] {call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
    return "".join(map(line, calls))
