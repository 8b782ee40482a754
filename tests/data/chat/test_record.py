"""Records of JSON lines: what a good one means, and everything that is wrong with a bad one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat.messages import Chat, Message, ToolCall
from data.chat.record import MESSAGE_KEYS, RECORD_KEYS, RecordError, chat_of
from data.chat.render import render

USER, ANSWER = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}


def call(name="f", arguments="{}", **more):
  return {"type": "function", "function": {"name": name, "arguments": arguments}} | more


def read(record):
  """The chat, or its problems."""
  try:
    return chat_of(record)
  except RecordError as error:
    return error.problems


def problems_of(*messages, **record):
  with pytest.raises(RecordError) as caught:
    chat_of({"messages": list(messages)} | record)
  return caught.value.problems


def test_a_trace_becomes_a_chat_with_results_in_the_order_of_calls():
  schema = {"name": "f", "description": "d", "parameters": {"type": "object"}}
  calls = [call("f", '{"x": [1, 2.0]}', id="a"), call("g", {"y": "z"}, id="b")]
  answers = [
    {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": calls},
    {"role": "tool", "tool_call_id": "b", "content": "second"},
    {"role": "tool", "tool_call_id": "a", "content": "first"},
    ANSWER | {"loss": False},
  ]
  record = {"messages": [USER, *answers], "tools": [{"type": "function", "function": schema}]}
  both = ToolCall("f", {"x": [1, 2.0]}), ToolCall("g", {"y": "z"})
  assert chat_of(json.loads(json.dumps(record))) == Chat(
    messages=(
      Message("user", "U"),
      Message("assistant", "", "R", both, learned=True),
      Message("tool", "first"),
      Message("tool", "second"),
      Message("assistant", "A", "", learned=False),
    ),
    tools=(schema,),
    effort=75,
  )


def test_results_that_name_no_call_answer_them_in_order():
  calls = {"role": "assistant", "tool_calls": [call("f"), call("g")]}
  results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
  chat = chat_of({"messages": [USER, calls, *results, ANSWER]})
  assert [message.content for message in chat.messages[2:4]] == ["1", "2"]


def test_thinking_is_on_where_effort_or_reasoning_is_given_or_where_it_is_asked_for():
  effort = lambda *messages, **record: chat_of({"messages": list(messages)} | record).effort
  assert effort(USER, ANSWER) is None
  assert effort(USER, ANSWER, thinking=True) == 75
  assert effort(USER, ANSWER, reasoning_effort=3) == 3
  assert effort(USER, ANSWER | {"reasoning_content": ""}) == 75
  assert problems_of(USER, ANSWER, thinking=False, reasoning_effort=3) == [
    "has reasoning or an effort, but its thinking is false"
  ]


def test_every_problem_of_a_record_is_given_at_once():
  found = problems_of(
    {"role": "usr"},
    {"role": "assistant", "contnt": "x", "loss": 1, "tool_calls": [call('a"'), {"name": "f"}]},
    {"role": "tool", "content": 3},
    ANSWER | {"tool_calls": [call(arguments="[1]"), call(arguments="{")]},
    tools={},
    reasoning_effort=True,
    seed=1,
  )
  expected = [
    "has the unknown key 'seed'; known are messages",
    "has no list under 'tools'",
    "message 1 has the role 'usr', accepted are system, user, assistant, tool",
    "message 2 has the unknown key 'contnt'; the nearest is 'content'",
    "message 2 has the name 'a\"' in a call",
    "message 2 has an item under 'tool_calls'",
    "message 2 has 1 under 'loss'",
    "message 3 has no text under 'content'",
    "message 4 has arguments that are not a JSON object: '[1]'",
    "message 4 has arguments that are not JSON: '{'",
    "has the reasoning_effort True, accepted are 1 to 100",
  ]
  for sentence in expected:
    assert any(problem.startswith(sentence) for problem in found), (sentence, found)


@pytest.mark.parametrize(
  ("messages", "expected"),
  [
    ([], "has no messages"),
    ([ANSWER], "message 1 answers nothing: it follows no message"),
    ([{"role": "system", "content": "S"}, ANSWER], "message 2 answers nothing: it follows system"),
    ([USER, ANSWER, ANSWER], "message 3 answers nothing: it follows assistant"),
    ([USER, {"role": "tool"}], "message 2 is a tool's result without a call right before it"),
    (
      [USER, ANSWER | {"tool_calls": [call()]}, USER, {"role": "tool"}],
      "message 4 is a tool's result without a call right before it",
    ),
    (
      [USER, {"role": "assistant", "tool_calls": [call()]}, {"role": "tool"}, {"role": "tool"}],
      "message 4 is a tool's result without a call right before it",
    ),
    (
      [USER, ANSWER | {"tool_calls": [call(id="a")]}, {"role": "tool", "tool_call_id": "b"}],
      "message 3 answers the call 'b', which is not open",
    ),
    (
      [
        USER,
        ANSWER | {"tool_calls": [call(id="a"), call(id="b")]},
        {"role": "tool", "tool_call_id": "b"},
      ],
      "has a result whose earlier call, in the same message, has none",
    ),
    ([USER, ANSWER | {"content": "\ud800"}], "message 2 has no text under 'content'"),
    (
      [USER, ANSWER | {"tool_calls": [call(arguments={"x": "\ud800"})]}],
      "cannot be written: it holds half of a surrogate pair, which is no text",
    ),
    (
      [USER, ANSWER | {"tool_calls": [call(arguments={"x": float("nan")})]}],
      "cannot be written: Out of range float values are not JSON compliant: nan",
    ),
  ],
)
def test_what_cannot_be_a_chat_says_why(messages, expected):
  assert problems_of(*messages) == [expected]


KEYS = sorted({*RECORD_KEYS, *(key for keys in MESSAGE_KEYS.values() for key in keys), "function"})
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
VALUES = st.recursive(
  st.one_of(SCALARS, st.sampled_from([*MESSAGE_KEYS, "function", "{}"])),
  lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
  ),
  max_leaves=8,
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(VALUES, st.lists(VALUES, max_size=3))
def test_any_json_is_a_chat_that_can_be_encoded_or_has_its_problems_told(encoder, record, messages):
  if isinstance(record, dict):
    record["messages"] = [USER, *messages]
  chat = read(record)
  assert isinstance(chat, list) or len(encoder.encode(render(chat).pieces())) > 0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.sampled_from(KEYS), VALUES, st.integers(0, 3))
def test_one_wrong_value_in_a_good_record_is_no_crash(key, value, place):
  calls = [call("f", '{"x": 1}', id="a")]
  messages = [USER, ANSWER | {"tool_calls": calls}, {"role": "tool", "tool_call_id": "a"}, ANSWER]
  record = {"messages": [dict(message) for message in messages]}
  (record if place == 3 else record["messages"][place])[key] = value
  assert read(json.loads(json.dumps(record))) != []
