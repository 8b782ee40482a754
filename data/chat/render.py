"""Chats -> turns of pieces, marks and text apart."""

import dataclasses
import json
from collections.abc import Iterable, Sequence

from data.chat.markup import (
  BLANK_LINE,
  EFFORT,
  RESULT,
  RESULT_END,
  TOOLS_BEGIN,
  TOOLS_END,
  Mark,
  Piece,
  split_at_marks,
)
from data.chat.messages import Chat, Message, ToolCall


@dataclasses.dataclass(frozen=True)
class Turn:
  """What comes in, the opening of the answer, and the answer.

  The model gives the answer, its EOS included; everything else it is given, the opening's <think>
  or </think> too. A last turn may have no answer yet: then `opening` and `answer` are empty.
  """

  inputs: Sequence[Piece]  # user, tool and later system messages
  opening: Sequence[Piece] = ()
  answer: Sequence[Piece] = ()
  learned: bool = False
  is_step: bool = False  # goes on with tool results, so it needs the turn before it


@dataclasses.dataclass(frozen=True)
class Rendered:
  head: list[Piece]  # BOS and the first system block
  turns: list[Turn]

  def pieces(self) -> list[Piece]:
    parts = [self.head, *([*t.inputs, *t.opening, *t.answer] for t in self.turns)]
    return joined(piece for part in parts for piece in part)


def render(chat: Chat) -> Rendered:
  """Writes a chat in the released format.

  Raises: ValueError where an answer does not follow a user, tool or later system message, or where
  a tool result is without its call.
  """
  messages = list(chat.messages)
  first = messages.pop(0).content if messages and messages[0].role == "system" else None
  head = joined([Mark.BOS, *_system_block(chat, first)])
  turns, inputs, pending = [], [], 0
  for message in messages:
    if message.role != "assistant":
      pending -= message.role == "tool"
      if pending < 0:
        raise ValueError("a tool result is without its call")
      inputs.append(message)
      continue
    if not inputs:
      raise ValueError("an answer must follow a user, tool or later system message")
    opening = [Mark.ASSISTANT, Mark.THINK_END if message.reasoning is None else Mark.THINK]
    is_step = inputs[0].role == "tool"
    turns.append(Turn(_inputs(inputs), opening, joined(_answer(message)), message.learned, is_step))
    inputs, pending = [], len(message.calls)
  if inputs:
    turns.append(Turn(_inputs(inputs), is_step=inputs[0].role == "tool"))
  return Rendered(head, turns)


def prompt(chat: Chat) -> list[Piece]:
  """The chat up to the point where the model answers.

  Raises: ValueError where the last message is an answer already, and as `render`.
  """
  if chat.messages and chat.messages[-1].role == "assistant":
    raise ValueError("the last message is an answer already")
  opening = [Mark.ASSISTANT, Mark.THINK_END if chat.effort is None else Mark.THINK]
  return [*render(chat).pieces(), *opening]


def as_text(pieces: Iterable[Piece]) -> str:
  """For reading. Where text spells a mark the difference is lost; tokens keep it."""
  return "".join(piece.value if isinstance(piece, Mark) else piece for piece in pieces)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
  """The same pieces without empty text and with neighbouring texts in one."""
  out: list[Piece] = []
  for piece in pieces:
    if isinstance(piece, str) and out and isinstance(out[-1], str):
      out[-1] += piece
    elif piece:
      out.append(piece)
  return out


def _system_block(chat: Chat, content: str | None) -> list[Piece]:
  if content is None and chat.effort is None and not chat.tools:
    return []
  effort = "" if chat.effort is None else EFFORT.format(chat.effort)
  block: list[Piece] = [Mark.SYSTEM, effort, content or ""]
  if chat.tools:
    schemas = "\n".join(_json(tool) for tool in chat.tools)
    block += [BLANK_LINE, *split_at_marks(TOOLS_BEGIN, (Mark.DSML,)), schemas, TOOLS_END]
  return block


def _inputs(messages: Sequence[Message]) -> list[Piece]:
  pieces: list[Piece] = []
  before = None
  for message in messages:
    if message.role == "system":
      pieces.append(Mark.SYSTEM)
    else:
      pieces.append(BLANK_LINE if before in ("user", "tool") else Mark.USER)
    is_result = message.role == "tool"
    pieces.append(f"{RESULT}{message.content}{RESULT_END}" if is_result else message.content)
    before = message.role
  return joined(pieces)


def _answer(message: Message) -> list[Piece]:
  thought = [] if message.reasoning is None else [message.reasoning, Mark.THINK_END]
  return [*thought, message.content, *_calls(message.calls), Mark.EOS]


def _calls(calls: Sequence[ToolCall]) -> list[Piece]:
  if not calls:
    return []
  pieces: list[Piece] = [BLANK_LINE, "<", Mark.DSML, " calls>\n"]
  for call in calls:
    pieces += ["<", Mark.DSML, f' invoke name="{call.name}">\n']
    for number, (name, value) in enumerate(call.arguments.items()):
      is_text = isinstance(value, str)
      tag = f' parameter name="{name}" string="{"true" if is_text else "false"}">'
      pieces += ["\n" if number else "", "<", Mark.DSML, tag]
      pieces += [value if is_text else _json(value), "</", Mark.DSML, " parameter>"]
    pieces += ["\n</", Mark.DSML, " invoke>\n"]
  return [*pieces, "</", Mark.DSML, " calls>"]


def _json(value: object) -> str:
  return json.dumps(value, ensure_ascii=False, allow_nan=False)
