"""What there is to learn from a chat, given that earlier reasoning is not shown again."""

import dataclasses

from data.chat.messages import Chat, Message


def views(chat: Chat) -> list[Chat]:
  """The chats whose answers are learned: the chat itself, or one for each exchange.

  With thinking and without tools the format drops the reasoning of all but the last exchange
  (model.md section 4.1). No single text then holds every answer as the model gives it; so each
  exchange is learned at the end of a chat of its own, in which the earlier ones are context.
  """
  acts = bool(chat.tools) or any(message.calls for message in chat.messages)
  starts = [i for i in range(len(chat.messages)) if _opens(chat.messages, i)]
  if chat.effort is None or acts or len(starts) < 2:
    return [chat]
  found = []
  for start, end in zip(starts, [*starts[1:], len(chat.messages)], strict=True):
    exchange = chat.messages[start:end]
    if any(message.learned for message in exchange):
      earlier = tuple(map(_without_reasoning, chat.messages[:start]))
      found.append(dataclasses.replace(chat, messages=earlier + exchange))
  return found


def _opens(messages: tuple[Message, ...], index: int) -> bool:
  """Whether an exchange begins here: something is said that answers no call."""
  head = messages[0].role == "system"
  after_answer = index == head or messages[index - 1].role == "assistant"
  return after_answer and messages[index].role in ("user", "system")


def _without_reasoning(message: Message) -> Message:
  return dataclasses.replace(message, reasoning=None, learned=False)


def shown(chat: Chat) -> Chat:
  """The chat as a model is shown it that is to answer, without reasoning that the format drops."""
  asked = dataclasses.replace(chat, messages=(*chat.messages, Message("assistant", learned=True)))
  last = views(asked)[-1]
  return dataclasses.replace(last, messages=last.messages[:-1])
