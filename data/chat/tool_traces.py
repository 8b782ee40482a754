"""A generated set of tool traces: arithmetic, and look-ups in the standard library's text.

Every value is a function of the seed, the number of the chat and the interpreter's own library, so
that a machine without a network can train and test the use of tools. Answers are right: every
result is computed.
"""

import operator
import random
from collections.abc import Iterator
from typing import Any

from data.chat.library_text import Library, standard_library
from data.chat.messages import Chat, Message, ToolCall

DEFAULT_CHATS = 2000
EXCHANGES = 2, 3  # in a chat
LINES = 4, 16  # of a file that are read at a time
THINKING_SHARE = 0.5  # of the chats

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_TYPES = {"expression": "string", "name": "string", "path": "string", "word": "string"}
_TOOLS = {
  "calculate": ("Value of two integers with +, - or * between them.", ("expression",)),
  "find": ("File and line that define a name.", ("name",)),
  "read": ("Lines of a file.", ("path", "first", "lines")),
  "count": ("How often a word occurs in a file.", ("path", "word")),
}


def tool_traces(seed: int, chats: int) -> Iterator[Chat]:
  """Chats number 0 ... chats - 1 of a seed; more of them change none of the others."""
  library = standard_library()
  for number in range(chats):
    yield _Writer(random.Random(f"tool traces {seed} {number}"), library).chat()


class _Writer:
  """One chat, written from its beginning to its end."""

  def __init__(self, rng: random.Random, library: Library):
    self._rng = rng
    self._library = library
    self._effort = rng.randint(1, 100) if rng.random() < THINKING_SHARE else None
    self._messages: list[Message] = []
    self._last = 0  # the latest number that was answered

  def chat(self) -> Chat:
    if self._rng.random() < 0.5:
      self._messages.append(Message("system", "Answer from what the tools return."))
    first = self._arithmetic, self._definition, self._counts
    self._rng.choice(first)()
    for _ in range(self._rng.randint(*EXCHANGES) - 1):
      self._rng.choice((*first, self._follow_up))()
    used = {call.name for message in self._messages for call in message.calls}
    tools = tuple(_schema(name) for name in _TOOLS if name in used)
    return Chat(tuple(self._messages), tools, self._effort)

  def _arithmetic(self) -> None:
    a, b, c = (self._rng.randint(2, 99) for _ in range(3))
    first, second = "*", self._rng.choice("+-")
    self._ask(f"What is {a} {first} {b} {second} {c}?")
    product = self._calculate("The product comes first.", a, first, b)
    self._last = self._calculate("Now the rest.", product, second, c)
    self._say("That is the value.", f"{a} {first} {b} {second} {c} = {self._last}.")

  def _definition(self) -> None:
    name = self._rng.choice(list(self._library.definitions))
    path, line = self._library.definitions[name]
    lines = self._rng.randint(*LINES)
    asked = self._rng.choice(["Where is {} defined, and how does it begin?", "Show me {}."])
    self._ask(asked.format(name))
    self._use(f"I look for {name}.", ("find", {"name": name}, self._library.find(name)))
    first = max(1, line - self._rng.randint(0, 2))
    arguments = {"path": path, "first": first, "lines": lines}
    text = self._library.read(path, first, lines)
    self._use("Now I read the place.", ("read", arguments, text))
    begins = self._library.files[path][line - 1].strip()
    self._last = line
    self._say(f"Line {line} is the definition.", f"{path}, line {line}: {begins}")

  def _counts(self) -> None:
    paths = self._rng.sample(list(self._library.files), 2)
    word = self._rng.choice(self._library.words)
    self._ask(f"How often does {word} occur in {paths[0]} and {paths[1]} together?")
    counts = [self._library.count(path, word) for path in paths]
    calls = [
      ("count", {"path": path, "word": word}, str(count))
      for path, count in zip(paths, counts, strict=True)
    ]
    self._use("Both files can be counted at once.", *calls)
    self._last = self._calculate("The sum is asked for.", counts[0], "+", counts[1])
    self._say("That is the sum.", f"{word} occurs {self._last} times: {counts[0]} and {counts[1]}.")

  def _follow_up(self) -> None:
    factor, before = self._rng.randint(2, 9), self._last
    self._ask(f"And {factor} times that number?")
    self._last = self._calculate(f"That number is {before}.", before, "*", factor)
    self._say("Done.", f"{factor} times {before} is {self._last}.")

  def _calculate(self, thought: str, a: int, sign: str, b: int) -> int:
    value = OPERATORS[sign](a, b)
    self._use(thought, ("calculate", {"expression": f"{a} {sign} {b}"}, str(value)))
    return value

  def _ask(self, text: str) -> None:
    self._messages.append(Message("user", text))

  def _use(self, thought: str, *uses: tuple[str, dict[str, Any], str]) -> None:
    calls = tuple(ToolCall(name, arguments) for name, arguments, _ in uses)
    self._answer("", thought, calls)
    self._messages += [Message("tool", result) for _, _, result in uses]

  def _say(self, thought: str, text: str) -> None:
    self._answer(text, thought)

  def _answer(self, text: str, thought: str, calls: tuple[ToolCall, ...] = ()) -> None:
    reasoning = None if self._effort is None else thought
    self._messages.append(Message("assistant", text, reasoning, calls, learned=True))


def _schema(name: str) -> dict[str, Any]:
  description, parameters = _TOOLS[name]
  properties = {p: {"type": _TYPES.get(p, "integer")} for p in parameters}
  schema = {"type": "object", "properties": properties, "required": list(parameters)}
  return {"name": name, "description": description, "parameters": schema}
