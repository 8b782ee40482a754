"""What is hidden in a text and asked for at its end, as tokens.

Each riddle is a few needles, a question that repeats how one of them begins, and the answer that
only the needles give. Words and numbers are drawn, so that no text that was learned knows them. The
kinds follow RULER (arXiv 2404.06654): needles with one key, several keys, several values, variables
that are handed on; and two that need no language, a passage and a run of tokens that occur again.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

KEYS, VALUES, CHAINS, HOPS = 4, 3, 2, 2  # of a text with several
PASSAGE = 16  # tokens of a passage that are shown again, and tokens that are asked for
RUN = 4  # likewise of drawn tokens
DIGITS = 6
_SYLLABLE, _SYLLABLES = ("bdfgklmnprstvz", "aeiou"), 3

Encode = Callable[[str], Sequence[int]]


class Needle(NamedTuple):
  """Tokens to hide; what is asked for begins at number `border` of them."""

  tokens: np.ndarray  # [n] int32
  border: int


class Riddle(NamedTuple):
  needles: tuple[Needle, ...]  # in the order in which they stand
  question: np.ndarray  # int32
  answer: np.ndarray  # int32
  hidden: tuple[np.ndarray, ...]  # parts of the answer, each of which only one needle holds


class Writer:
  """Draws what riddles are made of.

  Args:
    encode: text -> token ids, without marks around it.
    text_N: int32 tokens of real text, for passages and for tokens that occur.
    rng: the only source of what is drawn.
  """

  def __init__(self, encode: Encode, text_N: np.ndarray, rng: np.random.Generator) -> None:
    self._encode, self._text_N, self._rng = encode, text_N, rng

  def tokens(self, text: str) -> np.ndarray:
    return np.array(self._encode(text), np.int32)

  def needle(self, before: str, answer: str, after: str) -> Needle:
    """Its parts are encoded one by one, so that the question's and the answer's tokens are its."""
    start, parts = self.tokens(before), (self.tokens(answer), self.tokens(after))
    return Needle(np.concatenate([start, *parts]), len(start))

  def names(self, count: int) -> list[str]:
    """Different words without a meaning."""
    found: dict[str, None] = {}
    while len(found) < count:
      letters = [self._rng.choice(list(sound)) for sound in _SYLLABLE * _SYLLABLES]
      found["".join(letters).capitalize()] = None
    return list(found)

  def numbers(self, count: int) -> list[str]:
    """Different numbers of DIGITS digits."""
    first, stop = 10 ** (DIGITS - 1), 10**DIGITS
    found: dict[str, None] = {}
    while len(found) < count:
      found[str(self._rng.integers(first, stop))] = None
    return list(found)

  def passage(self, tokens: int) -> np.ndarray:
    start = self._rng.integers(0, len(self._text_N) - tokens + 1)
    return self._text_N[start : start + tokens]

  def run(self, tokens: int) -> np.ndarray:
    """Tokens of the text, in an order of their own."""
    return self._text_N[self._rng.integers(0, len(self._text_N), tokens)]


def one_key(write: Writer, asked: int) -> Riddle:
  """A number that belongs to a name."""
  return _with_keys(write, 1, asked)


def several_keys(write: Writer, asked: int) -> Riddle:
  """The same with KEYS names, one of which is asked for."""
  return _with_keys(write, KEYS, asked)


def _with_keys(write: Writer, count: int, asked: int) -> Riddle:
  names, values = write.names(count), write.numbers(count)
  needles = tuple(
    write.needle(f"\nThe code of {name} is", f" {value}", ".\n")
    for name, value in zip(names, values, strict=True)
  )
  return _repeated(needles, asked, write.tokens(f" {values[asked]}"))


def several_values(write: Writer, asked: int) -> Riddle:
  """VALUES numbers of one name; all of them are asked for, in the order in which they stand."""
  del asked
  (name,), values = write.names(1), write.numbers(VALUES)
  needles = tuple(write.needle(f"\nA code of {name} is", f" {v}", ".\n") for v in values)
  parts = tuple(write.tokens(f" {value}") for value in values)
  comma = write.tokens(",")
  joined = [piece for part in parts for piece in (part, comma)]
  question = write.tokens(f"\nIn their order, the codes of {name} are")
  return Riddle(needles, question, np.concatenate(joined[:-1]), parts)


def variables(write: Writer, asked: int) -> Riddle:
  """CHAINS numbers, each handed on HOPS times; that of the last name of the first is asked for."""
  del asked
  names = np.reshape(write.names(CHAINS * (HOPS + 1)), (HOPS + 1, CHAINS))
  values = write.numbers(CHAINS)
  lines = []
  for hop, own in enumerate(names):
    given = values if hop == 0 else names[hop - 1]
    lines += [
      write.needle(f"\nlet {name} =", f" {source}", "\n")
      for name, source in zip(own, given, strict=True)
    ]
  answer = write.tokens(f" {values[0]}")
  return Riddle(tuple(lines), write.tokens(f"\nthe value of {names[-1][0]} ="), answer, (answer,))


def passage(write: Writer, asked: int) -> Riddle:
  """Real text that begins again as it stood before."""
  tokens = write.passage(2 * PASSAGE)
  return _repeated((Needle(tokens, PASSAGE),), asked, tokens[PASSAGE:])


def token_run(write: Writer, asked: int) -> Riddle:
  """Tokens without meaning that begin again as they stood before."""
  tokens = write.run(2 * RUN)
  return _repeated((Needle(tokens, RUN),), asked, tokens[RUN:])


def _repeated(needles: tuple[Needle, ...], asked: int, answer: np.ndarray) -> Riddle:
  """The question is how the asked needle begins."""
  needle = needles[asked]
  return Riddle(needles, needle.tokens[: needle.border], answer, (answer,))


class Kind(NamedTuple):
  write: Callable[[Writer, int], Riddle]  # (writer, number of the needle at the asked depth)
  needles: int
  in_order: bool = False  # the needle at the asked depth is the first; the others stand after it


KINDS = {
  "needle": Kind(one_key, 1),
  "needle_keys": Kind(several_keys, KEYS),
  "needle_values": Kind(several_values, VALUES),
  "variables": Kind(variables, CHAINS * (HOPS + 1), in_order=True),
  "copy": Kind(passage, 1),
  "induction": Kind(token_run, 1),
}
