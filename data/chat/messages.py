"""Chats as values: messages by role, tool calls, declared tools."""

import dataclasses
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
DEFAULT_EFFORT = 75  # what the release calls high (model.md section 4.1)


@dataclasses.dataclass(frozen=True)
class ToolCall:
  name: str
  arguments: dict[str, Any]  # JSON values by parameter


@dataclasses.dataclass(frozen=True)
class Message:
  """One message. Tool results stand right behind the calls that they answer, in their order."""

  role: Role
  content: str = ""
  reasoning: str | None = None  # of an assistant; None: it answers without thinking
  calls: tuple[ToolCall, ...] = ()  # of an assistant
  learned: bool = False  # of an assistant: its tokens carry loss


@dataclasses.dataclass(frozen=True)
class Chat:
  messages: tuple[Message, ...]
  tools: tuple[dict[str, Any], ...] = ()  # name, description and JSON schema of the parameters
  effort: int | None = None  # 1 ... 100, None: thinking is off


def canonical(chat: Chat) -> Chat:
  """The chat as the format can say it: what remains of it after writing and reading.

  Neighbouring user messages become one, joined by a blank line; an empty first system message goes
  where tools or an effort make such a block anyway (but stays before another system message, which
  would become the first); which messages are learned is not written.
  """
  messages: list[Message] = []
  for message in chat.messages:
    message = dataclasses.replace(message, learned=False)
    if message.role == "user" and messages and messages[-1].role == "user":
      joined = f"{messages[-1].content}\n\n{message.content}"
      messages[-1] = Message("user", joined)
    else:
      messages.append(message)
  alone = messages[:1] == [Message("system")] and [m.role for m in messages[1:2]] != ["system"]
  if alone and (chat.tools or chat.effort is not None):
    del messages[0]
  return dataclasses.replace(chat, messages=tuple(messages))
