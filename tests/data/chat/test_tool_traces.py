"""The generated set: the same every time, sayable, and right."""

from itertools import islice

from data.chat.library_text import standard_library
from data.chat.parse import unsayable
from data.chat.tool_traces import OPERATORS, tool_traces


def results(chat):
  """Every call with its result."""
  calls = []
  for message in chat.messages:
    if message.role == "tool":
      yield calls.pop(0), message.content
    calls += message.calls


def test_a_chat_depends_on_its_seed_and_number_only():
  few, more = list(tool_traces(3, 5)), list(islice(tool_traces(3, 50), 5))
  assert few == more
  assert list(tool_traces(4, 5)) != few
  assert len({str(chat) for chat in tool_traces(3, 50)}) == 50


def test_every_result_is_that_of_its_call():
  library, seen = standard_library(), set()
  for chat in tool_traces(0, 40):
    for call, result in results(chat):
      seen.add(call.name)
      arguments = call.arguments
      if call.name == "calculate":
        a, sign, b = arguments["expression"].split()
        assert int(result) == OPERATORS[sign](int(a), int(b))
      elif call.name == "find":
        path, line = result.split(", line ")
        assert arguments["name"] in library.files[path][int(line) - 1]
      elif call.name == "read":
        first, text = result.split("\n")[0].split(": ", 1)
        assert library.files[arguments["path"]][int(first) - 1] == text
      else:
        assert int(result) >= 0
  assert seen == {"calculate", "find", "read", "count"}


def test_chats_have_several_turns_with_and_without_thinking():
  chats = list(tool_traces(0, 40))
  assert all(unsayable(chat) is None for chat in chats)
  assert all(sum(m.role == "user" for m in chat.messages) >= 2 for chat in chats)
  assert all(chat.messages[-1].role == "assistant" for chat in chats)
  thinking = [chat.effort for chat in chats if chat.effort is not None]
  assert 10 < len(thinking) < 30 and len(set(thinking)) > 5
