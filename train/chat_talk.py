"""`generate --chat` on a terminal: a chat that goes on line by line, behind one cache."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from data.chat.messages import Chat, Message
from data.chat.parse import ChatError, unsayable
from data.chat.tokens import ChatTokenizer
from deepseek_jax.sampling.generate import Behind
from deepseek_jax.sampling.session import Session
from train.chat_prompt import Answer, chat_tokens


def typed_lines() -> Iterator[str]:
  """What the user types, until the end of the input."""
  while True:
    try:
      yield input("> ")
    except (EOFError, KeyboardInterrupt):
      return


def talk(
  session: Session,
  encoder: ChatTokenizer,
  lines: Iterable[str],
  go_on: Callable[..., Iterator[list[int | None]]],
  *,
  effort: int | None,
  room: int,
) -> Iterator[str]:
  """What is to be shown of the answers to user messages; every answer is part of what follows.

  An answer that is not whole, as one that takes all of its room, is forgotten with its question.

  Args:
    session: new.
    encoder: of the chats.
    lines: messages.
    go_on: sampling.generate.go_on with all that does not change.
    effort: None: without thinking.
    room: tokens that an answer may take.
  """
  messages: tuple[Message, ...] = ()
  for line in lines:
    chat = Chat((*messages, Message("user", line)), effort=effort)
    if reason := unsayable(chat):
      yield f"[not asked: {reason}]\n"
      continue
    tokens, answer = chat_tokens(encoder, chat), Answer(encoder, thinking=effort is not None)
    yield answer.begin()
    logits_1V = session.read(tokens, room)
    behind = Behind(logits_1V, np.array([len(tokens)], np.int32), np.zeros(1, np.int32))
    for (token,) in go_on(session.step, behind):
      yield "" if token is None else answer.add(token)
    yield f"{answer.end()}\n"
    try:
      messages = (*chat.messages, answer.message())
    except ChatError:
      yield "[forgotten]\n"
