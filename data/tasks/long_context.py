"""Riddles in real text of an exact length, the asked needle at a depth and, if wanted, on a border.

Legend: N tokens of the text, n tokens of a problem, h of them from the text.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from data.tasks.riddles import KINDS, Encode, Kind, Riddle, Writer

# Where a needle is cut in two, what is asked for being the second part:
# "inside": both parts have a token in one compressed entry; "entry": in two neighbouring entries of
# one pool block; "block": in entries of two blocks. Where an entry or a block is one token, or both
# have the same borders, a kind may say the same as another one, or nothing: see `borders`.
Border = Literal["anywhere", "inside", "entry", "block"]
REACH = 4  # times its length: the first tokens of the text, which a problem draws from
_ATTEMPTS = 100  # drawings of a riddle until nothing in the text looks like its answer


class Material(NamedTuple):
  """What all problems are made of."""

  text_N: np.ndarray  # int32 real text
  encode: Encode
  bos: int


class Sizes(NamedTuple):
  """Of a model, in tokens of a document, which both count from."""

  entry: int = 1  # of the widest compressed entry
  block: int = 1  # of a block of the candidate pool


class Sweep(NamedTuple):
  lengths: Sequence[int]  # tokens of a problem, BOS and answer included
  depths: Sequence[float]  # share of the text that stands before the asked needle, 0 ... 1
  repeats: int  # problems of a length and depth
  seed: int


class Problem(NamedTuple):
  tokens: np.ndarray  # [n] int32: BOS, text with the needles, question, answer
  answer: int  # position of its first token; it ends the problem
  depth: float
  starts: tuple[int, ...]  # position of each needle
  asked: int  # number of the needle at the depth
  border: int  # position at which its second part begins


def borders(sizes: Sizes) -> dict[Border, tuple[int, int]]:
  """Name -> (modulus, remainder) of the positions; only those that differ for these sizes."""
  both = math.lcm(sizes.entry, sizes.block)
  found: dict[Border, tuple[int, int]] = {}
  if sizes.entry > 1:
    found["inside"] = both, 1
  if both > sizes.entry or 1 == sizes.block < sizes.entry:
    found["entry"] = both, sizes.entry % both
  if sizes.block > 1:
    found["block"] = both, 0
  return found


def problems(
  kind: str,
  material: Material,
  sweep: Sweep,
  border: Border = "anywhere",
  sizes: Sizes = Sizes(),
) -> Iterator[Problem]:
  """The problems of a kind (a key of riddles.KINDS), one of every length and depth after the other
  before the second of any.

  A problem depends on its length, depth and number and on the seed, not on the other ones; another
  border only moves the asked needle.

  Raises: ValueError for a length that the needles or the text do not allow, for a depth out of
    range, and where drawing finds no answer that the text does not hold already.
  """
  if bad := [depth for depth in sweep.depths if not 0 <= depth <= 1]:
    raise ValueError(f"depths must lie in 0 ... 1, got {bad}.")
  places = {"anywhere": (1, 0), **borders(sizes)}
  if border not in places:
    raise ValueError(f"border is {border!r}, accepted for {sizes} are {', '.join(places)}.")
  for number in range(sweep.repeats):
    for length in sweep.lengths:
      for depth in sweep.depths:
        drawn = sweep.seed, zlib.crc32(kind.encode()), length, round(1e6 * depth), number
        rng = np.random.default_rng(drawn)
        yield _problem(KINDS[kind], material, length, depth, places[border], rng)


def _problem(
  kind: Kind,
  material: Material,
  length: int,
  depth: float,
  place: tuple[int, int],
  rng: np.random.Generator,
) -> Problem:
  material = material._replace(text_N=material.text_N[: REACH * length])
  for _ in range(_ATTEMPTS):
    others = rng.uniform(depth if kind.in_order else 0, 1, kind.needles - 1)
    asked = int(np.sum(others < depth))
    shares = np.insert(np.sort(others), asked, depth)
    riddle = kind.write(Writer(material.encode, material.text_N, rng), asked)
    text_h = _text(material, riddle, length, rng)
    found = _hide(text_h, riddle, shares, asked, place, material.bos)
    prompt = found.tokens[: found.answer]
    if all(occurrences(prompt, part) == 1 for part in riddle.hidden):
      return found._replace(depth=depth)
  raise ValueError(
    f"after {_ATTEMPTS} drawings the text of {length} tokens still holds what would be the answer."
  )


def _text(material: Material, riddle: Riddle, length: int, rng: np.random.Generator) -> np.ndarray:
  """As much real text as makes the problem that long."""
  own = sum(len(needle.tokens) for needle in riddle.needles)
  own += len(riddle.question) + len(riddle.answer) + 1
  missing = length - own
  if missing < 0:
    raise ValueError(f"a length of {length} tokens is too short: needles and question take {own}.")
  if missing > len(material.text_N):
    raise ValueError(
      f"a length of {length} tokens needs {missing} of real text, the validation split has "
      f"{len(material.text_N)}."
    )
  start = rng.integers(0, len(material.text_N) - missing + 1)
  return material.text_N[start : start + missing]


def _hide(
  text_h: np.ndarray,
  riddle: Riddle,
  shares: np.ndarray,
  asked: int,
  place: tuple[int, int],
  bos: int,
) -> Problem:
  """The needles in the text, each behind its share of it; the asked one moved to its border."""
  before = np.round(shares * len(text_h)).astype(int)  # tokens of the text before each needle
  fixed = 1 + sum(len(needle.tokens) for needle in riddle.needles[:asked])
  fixed += riddle.needles[asked].border  # what stands before the border besides text
  before[asked] = _nearest(before[asked], fixed, place, len(text_h))
  before[:asked] = np.minimum(before[:asked], before[asked])
  before[asked:] = np.maximum(before[asked:], before[asked])
  pieces, starts, at = [np.array([bos], np.int32)], [], 1
  for needle, text in zip(riddle.needles, np.split(text_h, before)[:-1], strict=True):
    starts.append(at + len(text))
    pieces += [text, needle.tokens]
    at = starts[-1] + len(needle.tokens)
  prompt = np.concatenate([*pieces, text_h[before[-1] :], riddle.question])
  return Problem(
    tokens=np.concatenate([prompt, riddle.answer]).astype(np.int32),
    answer=len(prompt),
    depth=0.0,
    starts=tuple(starts),
    asked=asked,
    border=fixed + int(before[asked]),
  )


def _nearest(wanted: int, fixed: int, place: tuple[int, int], most: int) -> int:
  """The number from 0 to `most` nearest to `wanted` that puts the border on its place."""
  modulus, remainder = place
  choices = np.arange((remainder - fixed) % modulus, most + 1, modulus)
  if not len(choices):
    raise ValueError(f"{most} tokens of text leave no place at {remainder} modulo {modulus}.")
  return int(choices[np.argmin(np.abs(choices - wanted))])


def occurrences(tokens: np.ndarray, part: np.ndarray) -> int:
  """How often a run of tokens stands in others."""
  if len(part) > len(tokens):
    return 0
  windows = np.lib.stride_tricks.sliding_window_view(tokens, len(part))
  return int(np.sum(np.all(windows == part, axis=1)))
