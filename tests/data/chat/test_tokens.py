"""Loss lies on what the model itself gives, to the token; marks are there or named."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from data.chat.markup import Mark
from data.chat.messages import Chat, Message, ToolCall
from data.chat.render import as_text, render
from data.chat.tokens import chat_tokenizer, conversation, encode_turns
from data.errors import RequestError
from data.prepare.tokenizer import CHAT_TOKENS, train_tokenizer

CALL = ToolCall("add", {"a": 1})
TRACE = Chat(
  (
    Message("system", "S"),
    Message("user", "two of them"),
    Message("assistant", "first", "thought", (CALL,), learned=True),
    Message("tool", "3"),
    Message("assistant", "skipped", "", learned=False),
    Message("user", "more"),
    Message("assistant", "last", "", learned=True),
  ),
  effort=9,
)


def test_loss_is_on_the_learned_answers_with_their_end_and_on_nothing_else(encoder):
  whole = conversation(*encode_turns(encoder, render(TRACE)))
  assert whole.problems() == []
  call = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n<｜DSML｜ parameter name="a" '
  call += 'string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
  eos = Mark.EOS.value
  answers = [f"thought</think>first{call}{eos}", f"</think>last{eos}"]
  text = lambda tokens: as_text(encoder.decode(tokens))
  assert [text(whole.tokens[a:b]) for a, b in whole.turns] == answers
  assert text(whole.tokens[whole.loss_mask]) == "".join(answers)
  assert [text(whole.tokens[a - 2 : a]) for a, _ in whole.turns] == ["<｜Assistant｜><think>"] * 2


def test_tokens_are_those_of_the_whole_text_where_nothing_is_spelled(encoder):
  """As a server that renders text and encodes it with all marks would have them."""
  tokens = conversation(*encode_turns(encoder, render(TRACE))).tokens
  text = as_text(render(TRACE).pieces())
  expected = encoder.tokenizer.encode(text, add_special_tokens=False).ids
  np.testing.assert_array_equal(tokens, expected)


def test_missing_marks_are_named_in_one_sentence():
  with pytest.raises(RequestError) as caught:
    chat_tokenizer(train_tokenizer(["text"], 259))
  (problem,) = caught.value.problems
  assert f"lacks tokens of the chat format: {', '.join(CHAT_TOKENS)};" in problem
  assert "--chat-tokens" in problem


def test_a_tokenizer_that_makes_marks_of_text_is_refused():
  words = [mark.value for mark in Mark]
  vocab = {word: number for number, word in enumerate(["<unk>", *words])}
  with pytest.raises(RequestError, match=r"spells .*<think>.*could forge them"):
    chat_tokenizer(Tokenizer(models.WordLevel(vocab, unk_token="<unk>")))


def test_trained_marks_follow_the_first_three_ids(encoder):
  assert [encoder.ids[mark] for mark in (Mark.BOS, Mark.EOS, Mark.SYSTEM)] == [0, 1, 3]
  assert sorted(encoder.ids.values()) == [0, 1, *range(3, 3 + len(CHAT_TOKENS))]
