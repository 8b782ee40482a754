"""Chats of all shapes, for hypothesis."""

import math

from hypothesis import strategies as st

from data.chat.markup import EFFORT, TOOLS_BEGIN, Mark
from data.chat.messages import Chat, Message, ToolCall

# What the format is made of, spelled by somebody else.
HOSTILE = [
  *(mark.value for mark in Mark),
  "<tool_result>",
  "</tool_result>",
  "\n\n",
  "<",
  "</",
  " calls>\n",
  '"',
  " invoke>",
]
TEXTS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=5)), max_size=4).map("".join)
TAME = st.text(st.characters(exclude_characters="<>｜", exclude_categories=["Cs"]), max_size=8)
NAMES = st.text(st.characters(exclude_characters='"', exclude_categories=["Cs"]), max_size=5)
EFFORTS = st.one_of(st.none(), st.integers(1, 100))
SYSTEMS = st.one_of(TEXTS, st.just(EFFORT.format(7)), st.just("\n\n" + TOOLS_BEGIN))


def json_values(texts):
  numbers = st.one_of(st.integers(), st.floats().filter(math.isfinite))
  leaves = st.one_of(texts, numbers, st.booleans(), st.none())
  deeper = lambda inner: st.one_of(st.lists(inner), st.dictionaries(texts, inner))
  return st.recursive(leaves, deeper, max_leaves=4)


@st.composite
def chats(draw, texts=TEXTS, tool_texts=TAME, systems=SYSTEMS):
  """A chat that ends with an answer. The format has no way to say </tool_result> in a result."""
  effort = draw(EFFORTS)
  values = json_values(texts)
  call = st.builds(ToolCall, NAMES, st.dictionaries(NAMES, values, max_size=3))
  messages, answered = [], []
  if draw(st.booleans()):
    messages.append(Message("system", draw(systems)))
  for _ in range(draw(st.integers(1, 4))):
    results = [Message("tool", draw(tool_texts)) for _ in answered]
    messages += results
    if not results or draw(st.booleans()):
      late_system = draw(st.booleans()) and bool(messages)
      messages += [Message("system", draw(texts))] if late_system else []
      messages.append(Message("user", draw(tool_texts if results else texts)))
    answered = draw(st.lists(call, max_size=2))
    thought = None if effort is None else draw(st.one_of(st.none(), texts))
    answer = Message("assistant", draw(texts), thought, tuple(answered), draw(st.booleans()))
    messages.append(answer)
  tools = st.lists(st.dictionaries(texts, values, max_size=2), max_size=2)
  return Chat(tuple(messages), tuple(draw(tools)), effort)
