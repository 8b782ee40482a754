"""Long chats: every learned answer is in one conversation, with what it answers, or is named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat.messages import Chat, Message, ToolCall
from data.chat.parse import parse
from data.chat.render import render
from data.chat.split import Room, split
from data.chat.tokens import encode_turns
from data.chat.views import views

CALL = ToolCall("f", {})


def agent(steps: int, size: int) -> Chat:
  """One question, `steps` calls with results of `size` words, and an answer."""
  messages = [Message("system", "S"), Message("user", "question")]
  for step in range(steps):
    messages.append(Message("assistant", f"call {step}", None, (CALL,), learned=True))
    messages.append(Message("tool", f"result {step}" + " word" * size))
  return Chat((*messages, Message("assistant", "done", learned=True)))


def pieces_of(encoder, chat, slots, decoder_slots=10**6, window=1):
  return split(*encode_turns(encoder, render(chat)), Room(slots, decoder_slots, window))


def learned_texts(encoder, piece):
  whole = piece.conversation
  return [encoder.decode(whole.tokens[a:b])[0] for a, b in whole.turns]


@settings(deadline=None, derandomize=True, max_examples=25)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(100, 1000))
def test_every_learned_answer_is_in_one_conversation_or_named(encoder, sizes, slots):
  chats = [agent(2, size).messages[1:] for size in sizes]
  chat = Chat(tuple(message for messages in chats for message in messages))
  pieces, too_long = pieces_of(encoder, chat, slots)
  answers = sum(message.role == "assistant" for message in chat.messages)
  learned = sum(len(piece.conversation.turns) for piece in pieces)
  assert learned + len(too_long) == answers
  assert all(piece.conversation.problems() == [] for piece in pieces)
  assert all(len(piece.conversation.tokens) <= slots for piece in pieces)


def test_a_conversation_from_the_middle_repeats_what_its_first_result_belongs_to(encoder):
  pieces, too_long = pieces_of(encoder, agent(6, 20), 400)
  assert not too_long
  assert len(pieces) > 1
  for piece in pieces:
    chat = parse(encoder.decode(piece.conversation.tokens))
    assert [m.content for m in chat.messages[:2]] == ["S", "question"]
    for before, message in zip(chat.messages, chat.messages[1:], strict=False):
      if message.role == "tool":
        assert before.content.split()[1] == message.content.split()[1]
  said = [text for piece in pieces for text in learned_texts(encoder, piece)]
  assert [text.split("\n")[0] for text in said] == [*(f"call {n}" for n in range(6)), "done"]


def test_what_no_row_can_hold_is_named_with_what_it_needs(encoder):
  chat = agent(3, 20)
  long = Message("tool", "result 1" + " word" * 300)
  chat = Chat((*chat.messages[:5], long, *chat.messages[6:]))
  pieces, too_long = pieces_of(encoder, chat, 600)
  assert [answer.answer for answer in too_long] == [3]  # the one that reads the long result
  assert too_long[0].slots > 900
  assert sum(len(piece.conversation.turns) for piece in pieces) == 3


def test_decoder_slots_bound_a_conversation_too(encoder):
  chat = agent(6, 5)
  whole, _ = pieces_of(encoder, chat, 10**6)
  assert len(whole) == 1
  cut, too_long = pieces_of(encoder, chat, 10**6, decoder_slots=150, window=20)
  room = Room(10**6, 150, 20)
  assert not too_long
  assert len(cut) > 1
  assert all(room.holds(piece.conversation) for piece in cut)


def test_nothing_is_cut_where_a_row_holds_all_of_it(encoder):
  chat = agent(3, 4)
  (piece,), _ = pieces_of(encoder, chat, 10**6)
  np.testing.assert_array_equal(piece.conversation.tokens, encoder.encode(render(chat).pieces()))
  assert piece.answer_bytes == sum(
    len(text.encode())
    for turn in render(chat).turns
    for text in turn.answer
    if isinstance(text, str)
  )


@pytest.mark.parametrize("tools", [(), ({"name": "f"},)], ids=["plain", "tools"])
def test_earlier_reasoning_is_shown_only_where_there_are_tools(tools):
  exchange = lambda n: (
    Message("user", f"u{n}"),
    Message("assistant", f"a{n}", f"r{n}", learned=True),
  )
  chat = Chat((Message("system", "S"), *exchange(0), *exchange(1)), tools, effort=50)
  if tools:
    assert views(chat) == [chat]
    return
  first, second = views(chat)
  assert first.messages == chat.messages[:3]
  assert second.messages[2] == Message("assistant", "a0", None, learned=False)
  assert second.messages[3:] == chat.messages[3:]


def test_an_exchange_that_is_not_learned_is_context_only():
  chat = Chat(
    (
      Message("user", "u0"),
      Message("assistant", "a0", "", learned=False),
      Message("user", "u1"),
      Message("assistant", "a1", "r", learned=True),
    ),
    effort=50,
  )
  (view,) = views(chat)
  assert [message.content for message in view.messages] == ["u0", "a0", "u1", "a1"]
