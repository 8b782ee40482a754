"""One record of a JSONL file -> a chat, or every reason for which it is none.

{"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": text,
               "reasoning_content": text,                                  of an assistant
               "tool_calls": [{"id": text, "type": "function",
                               "function": {"name": text, "arguments": object or its JSON}}],
               "loss": true | false,       of an assistant: learned or not; true if left out
               "tool_call_id": text},      of a tool: the call that it answers
              ...],
 "tools": [{"type": "function", "function": {"name", "description", "parameters"}}, ...],
 "thinking": true | false,                 if left out: whether an effort or reasoning is given
 "reasoning_effort": 1 ... 100,            if left out: 75 where thinking is on
 "id": anything, "metadata": anything}     not read
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable
from typing import Any

from data.chat.messages import DEFAULT_EFFORT, Chat, Message, ToolCall
from data.chat.parse import unsayable
from data.chat.render import as_text, render

RECORD_KEYS = ("messages", "tools", "thinking", "reasoning_effort", "id", "metadata")
MESSAGE_KEYS = {
  "system": ("role", "content"),
  "user": ("role", "content"),
  "assistant": ("role", "content", "reasoning_content", "tool_calls", "loss"),
  "tool": ("role", "content", "tool_call_id", "name"),
}


class RecordError(ValueError):
  """`problems` holds every reason, each the end of a sentence that begins with the place."""

  def __init__(self, problems: list[str]):
    super().__init__("; ".join(problems))
    self.problems = problems


@dataclasses.dataclass
class _Numbered:
  """A message with what only the record knows of it."""

  message: Message
  number: int  # from 1
  ids: list[Any]  # of its calls; of a tool: of the call that it answers


def chat_of(record: Any) -> Chat:
  """The chat of a parsed JSON value. Raises RecordError."""
  if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
    raise RecordError(["is not a JSON object with a list under 'messages'"])
  problems = _unknown_keys(record, RECORD_KEYS)
  tools = []
  for tool in _items(record, "tools", problems):
    tools.append(_function(tool, "tools", problems))
    if not isinstance(tools[-1].get("name"), str):
      problems.append("has a tool without a name")
  numbered = []
  for number, values in enumerate(record["messages"], 1):
    own: list[str] = []
    numbered.append(_message(values, number, own))
    problems += [f"message {number} {problem}" for problem in own]
  if not numbered:
    problems.append("has no messages")
  effort = _effort(record, numbered, problems)
  problems = problems or _order_problems(numbered)
  if problems:
    raise RecordError(problems)
  messages = [_thinking(m) if effort else m for m in _in_call_order(numbered, problems)]
  chat = Chat(tuple(messages), tuple(tools), effort)
  if not problems and (reason := _unwritable(chat)):
    problems.append(f"cannot be written: {reason}")
  if problems:
    raise RecordError(problems)
  return chat


def _unwritable(chat: Chat) -> str | None:
  if reason := unsayable(chat):
    return reason
  whole = as_text(render(chat).pieces())
  return None if _is_unicode(whole) else "it holds half of a surrogate pair, which is no text"


def _message(values: Any, number: int, problems: list[str]) -> _Numbered:
  role = values.get("role") if isinstance(values, dict) else None
  if role not in tuple(MESSAGE_KEYS):  # which need not be hashable
    problems.append(f"has the role {role!r}, accepted are {', '.join(MESSAGE_KEYS)}")
    return _Numbered(Message("user"), number, [])
  problems += _unknown_keys(values, MESSAGE_KEYS[role])
  reasoning = _text(values, "reasoning_content", problems)
  calls, ids = [], [values.get("tool_call_id")]
  if role == "assistant":
    items = _items(values, "tool_calls", problems)
    ids = [item.get("id") if isinstance(item, dict) else None for item in items]
    calls = [_call(item, problems) for item in items]
  learned = values.get("loss", role == "assistant")
  if not isinstance(learned, bool):
    problems.append(f"has {learned!r} under 'loss', accepted are true and false")
  content = _text(values, "content", problems) or ""
  return _Numbered(Message(role, content, reasoning, tuple(calls), bool(learned)), number, ids)


def _call(item: Any, problems: list[str]) -> ToolCall:
  function = _function(item, "tool_calls", problems)
  name, arguments = function.get("name"), function.get("arguments", {})
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments or "{}")
    except ValueError:
      problems.append(f"has arguments that are not JSON: {arguments[:40]!r}")
      arguments = {}
  if not isinstance(arguments, dict):
    problems.append(f"has arguments that are not a JSON object: {str(arguments)[:40]!r}")
    arguments = {}
  for text in (name, *arguments):
    if not isinstance(text, str) or '"' in text or not _is_unicode(text):
      problems.append(f"has the name {text!r} in a call; a name is text without quotation marks")
  return ToolCall(str(name), arguments)


def _function(item: Any, where: str, problems: list[str]) -> dict[str, Any]:
  function = item.get("function") if isinstance(item, dict) else None
  if isinstance(function, dict) and item.get("type", "function") == "function":
    return function
  problems.append(
    f"has an item under {where!r} that is not {{'type': 'function', 'function': ...}}"
  )
  return {}


def _items(values: dict, key: str, problems: list[str]) -> list:
  items = values.get(key)
  if items is None or isinstance(items, list):
    return items or []
  problems.append(f"has no list under {key!r}")
  return []


def _text(values: dict, key: str, problems: list[str]) -> str | None:
  text = values.get(key)
  if text is None or (isinstance(text, str) and _is_unicode(text)):
    return text
  problems.append(f"has no text under {key!r}")
  return None


def _is_unicode(text: str) -> bool:
  try:
    text.encode()
  except UnicodeEncodeError:  # a lone surrogate, which JSON can carry
    return False
  return True


def _unknown_keys(values: dict, known: Iterable[str]) -> list[str]:
  problems = []
  for key in values.keys() - set(known):
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = f"the nearest is {near[0]!r}" if near else f"known are {', '.join(known)}"
    problems.append(f"has the unknown key {key!r}; {hint}")
  return sorted(problems)


def _effort(record: dict, numbered: list[_Numbered], problems: list[str]) -> int | None:
  """1 ... 100, None where thinking is off."""
  effort, thinking = record.get("reasoning_effort"), record.get("thinking")
  reasons = any(item.message.reasoning is not None for item in numbered)
  if effort is not None and (type(effort) is not int or not 1 <= effort <= 100):
    problems.append(f"has the reasoning_effort {effort!r}, accepted are 1 to 100")
  if not (thinking is None or isinstance(thinking, bool)):
    problems.append(f"has {thinking!r} under 'thinking', accepted are true and false")
  if thinking is False and (reasons or effort is not None):
    problems.append("has reasoning or an effort, but its thinking is false")
  if thinking is None:
    thinking = reasons or effort is not None
  return (effort or DEFAULT_EFFORT) if thinking else None


def _thinking(message: Message) -> Message:
  if message.role != "assistant" or message.reasoning is not None:
    return message
  return dataclasses.replace(message, reasoning="")


def _order_problems(numbered: list[_Numbered]) -> list[str]:
  problems, before, open_calls = [], None, 0
  for item in numbered:
    role = item.message.role
    if role == "assistant" and (before in (None, "assistant") or _only_a_head(before, item)):
      problems.append(f"message {item.number} answers nothing: it follows {before or 'no message'}")
    if role == "tool" and not (before in ("assistant", "tool") and open_calls):
      problems.append(f"message {item.number} is a tool's result without a call right before it")
    open_calls = len(item.message.calls) if role == "assistant" else open_calls - (role == "tool")
    before = role
  return problems


def _only_a_head(before: str, item: _Numbered) -> bool:
  return before == "system" and item.number == 2


def _in_call_order(numbered: list[_Numbered], problems: list[str]) -> list[Message]:
  """The messages, results in the order of the calls that they name."""
  messages: list[Message] = []
  expected: list[Any] = []  # ids of the calls that are open
  results: dict[int, Message] = {}  # position among the calls -> result
  for item in [*numbered, None]:
    if item and item.message.role == "tool":
      (named,) = item.ids
      by_name = named is not None and named in expected
      position = expected.index(named) if by_name else len(results)
      if (named is not None and not by_name) or position in results:
        problems.append(f"message {item.number} answers the call {named!r}, which is not open")
      results[position] = item.message
      continue
    if sorted(results) != list(range(len(results))):
      problems.append("has a result whose earlier call, in the same message, has none")
    messages += [results[position] for position in sorted(results)]
    results = {}
    if item:
      messages.append(item.message)
      expected = item.ids if item.message.role == "assistant" else []
  return messages
