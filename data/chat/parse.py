"""Pieces -> chats: the inverse of render.py, up to what `messages.canonical` names."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from data.chat.markup import (
  BLANK_LINE,
  EFFORT_PATTERN,
  RESULT,
  RESULT_END,
  TOOLS_BEGIN,
  TOOLS_END,
  Mark,
  Piece,
)
from data.chat.messages import Chat, Message, ToolCall, canonical
from data.chat.render import as_text, joined, render

_INVOKE = re.compile(r' invoke name="([^"]*)">\n(<|\n</)')
_PARAMETER = re.compile(r' parameter name="([^"]*)" string="(true|false)">(.*)</', re.DOTALL)


class ChatError(ValueError):
  """Pieces or tokens that are no chat in the released format."""


def parse(pieces: Iterable[Piece]) -> Chat:
  """Reads a chat, with or without an answer at its end.

  Raises: ChatError that says what was expected instead of what stands there.
  """
  rest = joined(pieces)
  if rest[:1] == [Mark.BOS]:
    del rest[0]
  effort, tools, messages = None, (), []
  if rest[:1] == [Mark.SYSTEM]:
    del rest[0]
    effort, content, tools = _system_block(as_text(_take(rest, (Mark.DSML,))))
    if content or (effort is None and not tools) or rest[:1] == [Mark.SYSTEM]:
      messages.append(Message("system", content))
  pending = 0  # calls without a result
  while rest:
    mark = rest.pop(0)
    if mark == Mark.SYSTEM:
      messages.append(Message("system", as_text(_take(rest))))
    elif mark == Mark.USER:
      messages += _user_block(as_text(_take(rest)), pending)
      pending = 0
    elif mark == Mark.ASSISTANT:
      if len(rest) == 1 and rest[0] in (Mark.THINK, Mark.THINK_END):
        break  # a prompt
      message = _answer_of(rest)
      messages.append(message)
      pending = len(message.calls)
    else:
      raise ChatError(f"expected a system, user or assistant mark, got {_shown(mark)}")
  return Chat(tuple(messages), tools, effort)


def parse_answer(pieces: Iterable[Piece], *, thinking: bool) -> Message:
  """Reads what the model gave after a prompt, its EOS included.

  Raises: ChatError as `parse`.
  """
  rest = joined([Mark.THINK if thinking else Mark.THINK_END, *pieces])
  message = _answer_of(rest)
  if rest:
    raise ChatError(f"expected nothing after the answer, got {_shown(rest[0])}")
  return message


def unsayable(chat: Chat) -> str | None:
  """Why a chat would not be read back as it is, if so.

  Some of the format is text, not marks: <tool_result>, the sentence about the effort, the list of
  tools. A message that spells it in the right place cannot be told from the real thing, and
  would be a way to forge it.
  """
  try:
    got = parse(render(chat).pieces())
  except ValueError as error:
    return f"{error}"
  wanted = canonical(chat)
  if got == wanted:
    return None
  differing = (a.role for a, b in zip(wanted.messages, got.messages, strict=False) if a != b)
  role = next(differing, "first system")
  return f"a {role} message spells a part of the format and would be read as that"


def _take(rest: list[Piece], inside: Sequence[Mark] = ()) -> list[Piece]:
  """Removes and returns what comes before the next mark, those of `inside` apart."""
  taken: list[Piece] = []
  while rest and (isinstance(rest[0], str) or rest[0] in inside):
    taken.append(rest.pop(0))
  return taken


def _system_block(text: str) -> tuple[int | None, str, tuple[dict[str, Any], ...]]:
  """Effort, content and tools of the first system block."""
  effort = None
  if found := EFFORT_PATTERN.match(text):
    effort, text = int(found[1]), text[found.end() :]
  content, begin, schemas = text.rpartition(BLANK_LINE + TOOLS_BEGIN)
  if begin and schemas.endswith(TOOLS_END):
    lines = schemas.removesuffix(TOOLS_END).split("\n")
    return effort, content, tuple(_loads(line) for line in lines)
  return effort, text, ()


def _user_block(text: str, pending: int) -> list[Message]:
  """Results of at most `pending` calls, and what the user says after them."""
  messages = []
  while pending and text.startswith(RESULT) and RESULT_END in text:
    content, _, after = text.removeprefix(RESULT).partition(RESULT_END)
    if after and not after.startswith(BLANK_LINE):
      break
    messages.append(Message("tool", content))
    pending -= 1
    if not after:
      return messages
    text = after.removeprefix(BLANK_LINE)
  return [*messages, Message("user", text)]


def _answer_of(rest: list[Piece]) -> Message:
  """Removes and reads an answer, from the <think> or </think> of its opening to its EOS."""
  reasoning = None
  if rest[:1] == [Mark.THINK]:
    del rest[0]
    reasoning = as_text(_take(rest))
  _expect(rest, Mark.THINK_END)
  body = _take(rest, (Mark.DSML,))
  _expect(rest, Mark.EOS)
  if Mark.DSML not in body:
    return Message("assistant", as_text(body), reasoning)
  first = body.index(Mark.DSML)
  texts = [piece for piece in body[first + 1 :: 2] if isinstance(piece, str)]
  content, begin, nothing = as_text(body[:first]).rpartition(BLANK_LINE + "<")
  if not begin or nothing or len(texts) != body[first:].count(Mark.DSML):
    raise ChatError("expected tool calls after a blank line, each tag with one DSML mark")
  return Message("assistant", content, reasoning, _calls(texts))


def _calls(texts: list[str]) -> tuple[ToolCall, ...]:
  """Reads a block of calls; `texts` are what follows each of its DSML marks."""
  calls, texts = [], texts[::-1]
  following = _tag(texts, " calls>\n")
  while following == "<":
    name, after = _matched(_INVOKE, texts).groups()
    arguments = {}
    while after == "<":
      key, is_text, value = _matched(_PARAMETER, texts).groups()
      if key in arguments:
        raise ChatError(f"parameter {key!r} is given twice")
      arguments[key] = value if is_text == "true" else _loads(value)
      after = _tag(texts, " parameter>\n")
    calls.append(ToolCall(name, arguments))
    following = _tag(texts, " invoke>\n")
  if texts != [" calls>"]:
    raise ChatError(f"expected the end of the calls, got {_shown(texts[::-1])}")
  return tuple(calls)


def _tag(texts: list[str], tag: str) -> str:
  """Removes a tag; returns what follows it, the beginning of an opening or of a closing one."""
  text = texts.pop() if texts else ""
  if text not in (tag + "<", tag + "</"):
    raise ChatError(f"expected {tag!r} and another tag, got {_shown(text)}")
  return text.removeprefix(tag)


def _matched(pattern: re.Pattern[str], texts: list[str]) -> re.Match[str]:
  text = texts.pop() if texts else ""
  found = pattern.fullmatch(text)
  if found is None:
    raise ChatError(f"expected {pattern.pattern!r}, got {_shown(text)}")
  return found


def _loads(text: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    raise ChatError(f"expected JSON, got {_shown(text)}") from None


def _expect(rest: list[Piece], mark: Mark) -> None:
  if rest[:1] != [mark]:
    raise ChatError(f"expected {mark.value}, got {_shown(rest[0]) if rest else 'the end'}")
  del rest[0]


def _shown(value: object) -> str:
  text = value.value if isinstance(value, Mark) else repr(value)
  return text if len(text) < 80 else text[:77] + "..."
