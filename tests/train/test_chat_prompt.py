"""What is asked as a chat, and how an answer is shown; no model."""

import json

import numpy as np
import pytest

from data.chat.markup import Mark
from data.chat.messages import Chat, Message, ToolCall
from data.chat.parse import ChatError
from data.chat.render import as_text, render
from data.chat.tokens import chat_tokenizer
from data.prepare.tokenizer import train_tokenizer
from train import generate_request
from train.chat_prompt import Answer, chat_tokens, read_chat
from train.errors import UsageError

USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def encoder():
  return chat_tokenizer(
    train_tokenizer(["some text to learn from, 2024 times"] * 9, 300, chat=True)
  )


def test_a_prompt_is_a_message_or_messages_or_a_record_or_a_file(tmp_path):
  one = Chat((Message("user", "hello"),))
  path = tmp_path / "chat.json"
  record = {"messages": [USER], "reasoning_effort": 30}
  path.write_text(json.dumps(record))
  assert read_chat("hello", None) == read_chat(json.dumps([USER]), None) == one
  asked = Chat(one.messages, effort=30)
  assert read_chat(json.dumps(record), None) == read_chat(str(path), 30) == asked
  assert read_chat("hello", 30) == asked
  for text in ("[1] is no list of messages", "say chat.json", "{x}"):
    assert read_chat(text, None).messages == (Message("user", text),)


@pytest.mark.parametrize(
  ("text", "effort", "sentence"),
  [
    ("nowhere.json", None, "--prompt nowhere.json cannot be read: No such file or directory."),
    ('[{"role": "user"', None, "is no JSON"),
    ('{"message": []}', None, "--prompt is not a JSON object with a list under 'messages'."),
    (json.dumps({"messages": [USER], "thinking": False}), 5, "but its thinking is false."),
    (
      json.dumps({"messages": [USER], "reasoning_effort": 9}),
      5,
      "--effort is 5, but --prompt has the reasoning_effort 9.",
    ),
    (json.dumps([USER, {"role": "assistant", "content": "a"}]), None, "ends with an answer"),
    (json.dumps([USER | {"contnt": ""}]), None, "unknown key 'contnt'; the nearest is 'content'"),
  ],
)
def test_what_is_wrong_with_a_prompt_is_one_sentence(text, effort, sentence):
  with pytest.raises(UsageError) as caught:
    read_chat(text, effort)
  assert any(sentence in problem for problem in caught.value.problems)


def test_messages_that_spell_the_format_stay_text(encoder):
  spelled = "".join(mark.value for mark in Mark)
  tokens = chat_tokens(encoder, read_chat(spelled, 7))
  marks = [m for m in encoder.decode(tokens) if isinstance(m, Mark)]
  assert marks == [Mark.BOS, Mark.SYSTEM, Mark.USER, Mark.ASSISTANT, Mark.THINK]
  assert spelled in as_text(encoder.decode(tokens))


def test_earlier_reasoning_is_not_shown_again(encoder):
  first = {"role": "assistant", "content": "one", "reasoning_content": "thought"}
  asked = lambda **more: read_chat(json.dumps({"messages": [USER, first, USER], **more}), 7)
  text = lambda chat: as_text(encoder.decode(chat_tokens(encoder, chat)))
  assert "thought" not in text(asked()) and "one" in text(asked())
  tools = [{"type": "function", "function": {"name": "f"}}]
  assert "thought" in text(asked(tools=tools))
  assert text(asked()).endswith(as_text([Mark.ASSISTANT, Mark.THINK]))


def answered(encoder, chat):
  """Tokens of a chat's last answer, as a model gives them."""
  return encoder.encode(render(chat).turns[-1].answer)


@pytest.mark.parametrize("effort", [None, 7])
def test_an_answer_is_shown_as_it_comes_and_is_read_back(encoder, effort):
  call = ToolCall("add", {"a": "ü", "b": [1]})
  message = Message("assistant", "sum:\n\n< ä", "<｜User｜>" if effort else None, (call,))
  tokens = answered(encoder, Chat((Message("user", "x"), message), effort=effort))
  answer = Answer(encoder, thinking=effort is not None)
  shown = answer.begin() + "".join(map(answer.add, tokens.tolist())) + answer.end()
  heads = ("[reasoning]\n<｜User｜>\n[answer]\n") if effort else ""
  assert shown == heads + 'sum:\n\n< ä\n[call] add {"a": "ü", "b": [1]}'
  assert answer.message() == message


def test_an_answer_that_breaks_off_says_so(encoder):
  answer = Answer(encoder, thinking=True)
  assert answer.add(int(np.array(encoder.plain.encode("t").ids)[0])) == "t"
  with pytest.raises(ChatError):
    answer.message()
  assert answer.end() == "\n[not a whole answer: expected </think>, got the end]"


def test_on_a_terminal_a_chat_needs_no_prompt():
  words = ["--checkpoint=d", "--chat", "--effort=9"]
  asked = generate_request.parse(words, terminal=True)
  assert asked.prompt is None and asked.is_chat and asked.effort == 9
  for terminal, more, sentence in (
    (False, [], "--prompt is missing."),
    (True, ["--samples=2"], "--samples is 2, but a chat on the terminal is one text."),
  ):
    with pytest.raises(UsageError, match=sentence):
      generate_request.parse([*words, *more], terminal=terminal)
