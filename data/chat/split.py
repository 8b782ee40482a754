"""Chats that are longer than a row -> conversations that fit, split between turns.

An exchange is a turn that begins with a user's message and the steps that go on with tool results.
A conversation that begins in the middle of one repeats the head, the message that opened the
exchange, and the turn before, none of it learned: what a result belongs to stays visible.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.chat.tokens import EncodedTurn, conversation
from data.conversation import Conversation
from deepseek_jax.layout import decoder_slots_of


class Room(NamedTuple):
  """What a row offers (section 3 of docs/design.md)."""

  slots: int  # S
  decoder_slots: int  # T
  window: int  # slots of the model's sliding window, which each response has in the decoder

  def needs(self, whole: Conversation) -> tuple[int, int]:
    """Slots and decoder slots of a conversation."""
    return len(whole.tokens), decoder_slots_of(whole.turns, self.window)

  def holds(self, whole: Conversation) -> bool:
    slots, decoder_slots = self.needs(whole)
    return slots <= self.slots and decoder_slots <= self.decoder_slots


class Piece(NamedTuple):
  conversation: Conversation
  answer_bytes: int  # UTF-8 bytes of the text of its learned answers


class TooLong(NamedTuple):
  """A learned answer that no row holds together with what it must be seen with."""

  answer: int  # which of the chat, from 1
  slots: int  # that it would need
  decoder_slots: int


def split(
  head: np.ndarray, turns: Sequence[EncodedTurn], room: Room
) -> tuple[list[Piece], list[TooLong]]:
  """Conversations that fit and hold every learned answer once, and the answers that cannot.

  What follows the last learned answer of a conversation is left out, as nothing is learned there.
  """
  pieces: list[Piece] = []
  too_long: list[TooLong] = []
  current: list[EncodedTurn] = []
  opener = 0  # the turn that opened this exchange
  for number, turn in enumerate(turns):
    opener = opener if turn.is_step else number
    if current and room.holds(conversation(head, [*current, turn])):
      current.append(turn)
      continue
    pieces += _piece(head, current)
    current = [*_reminder(turns, opener, number), turn]
    alone = conversation(head, current)
    if not room.holds(alone):
      current = []
      if turn.learned:
        too_long.append(TooLong(number + 1, *room.needs(alone)))
  return pieces + _piece(head, current), too_long


def _reminder(turns: Sequence[EncodedTurn], opener: int, number: int) -> list[EncodedTurn]:
  """What a conversation that begins with turn `number` must repeat of its exchange."""
  if number == opener:
    return []
  before = turns[number - 1]
  return [dataclasses.replace(before, inputs=turns[opener].inputs, learned=False)]


def _piece(head: np.ndarray, turns: Sequence[EncodedTurn]) -> list[Piece]:
  """At most one: nothing where nothing is learned."""
  learned = [number for number, turn in enumerate(turns) if turn.learned]
  if not learned:
    return []
  kept = turns[: learned[-1] + 1]
  size = sum(kept[number].answer_bytes for number in learned)
  return [Piece(conversation(head, kept), size)]
