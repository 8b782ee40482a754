"""What makes a conversation, and what is refused."""

import re

import numpy as np
import pytest

from data.conversation import Conversation


def conversation(length=10, learned=(3, 4, 8), turns=((3, 5), (7, 10))):
  mask = np.zeros(length, bool)
  mask[list(learned)] = True
  return Conversation(np.arange(length, dtype=np.int32), mask, turns)


def test_responses_in_order_with_learned_tokens_inside_have_no_problem():
  assert conversation().problems() == []
  assert conversation(learned=(), turns=()).problems() == []


@pytest.mark.parametrize(
  ("changes", "part"),
  [
    ({"turns": ((0, 5), (7, 10))}, "response 0 spans tokens 0 to 4"),
    ({"turns": ((3, 5), (4, 10))}, "response 1 spans tokens 4 to 9; .* come after token 4"),
    ({"turns": ((3, 5), (7, 11))}, "response 1 spans tokens 7 to 10; .* end before token 10"),
    ({"turns": ((3, 5), (7, 7)), "learned": (3,)}, "response 1 spans tokens 7 to 6"),
    ({"learned": (2, 3)}, "token 2 is learned but lies in no response"),
  ],
)
def test_what_is_refused_is_named(changes, part):
  (problem,) = conversation(**changes).problems()
  assert re.search(part, problem)
