"""Every problem has the length, the needles and the one answer that it says it has."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.plain_tokenizer import plain_tokenizer
from data.prepared import TOKENIZER
from data.tasks.long_context import Material, Sizes, Sweep, borders, occurrences, problems
from data.tasks.real_text import held_out_text
from data.tasks.riddles import KINDS, PASSAGE, RUN

SWEEP = Sweep(lengths=(300, 1001), depths=(0.0, 0.37, 1.0), repeats=2, seed=5)
SIZES = Sizes(entry=2, block=8)


@pytest.fixture(scope="module")
def material(prepared) -> Material:
  tokenizer = plain_tokenizer(Tokenizer.from_file(str(prepared.folder / TOKENIZER)))
  encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
  return Material(held_out_text([str(prepared.folder)], 10**6), encode, prepared.bos)


@pytest.fixture(scope="module")
def of_kind(material):
  """Kind -> its problems, made once."""
  return {kind: list(problems(kind, material, SWEEP)) for kind in KINDS}


@pytest.mark.parametrize("kind", list(KINDS))
def test_length_and_frame_are_exact(kind, of_kind, material):
  lengths = [len(problem.tokens) for problem in of_kind[kind]]
  assert lengths == [n for n in SWEEP.lengths for _ in SWEEP.depths] * SWEEP.repeats
  for problem in of_kind[kind]:
    assert problem.tokens.dtype == np.int32
    assert problem.tokens[0] == material.bos
    assert 0 < problem.border < problem.answer < len(problem.tokens)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "needle_values"])
def test_the_answer_stands_once_before_it_is_asked_for(kind, of_kind):
  for problem in of_kind[kind]:
    prompt, answer = np.split(problem.tokens, [problem.answer])
    assert occurrences(prompt, answer) == 1


@pytest.mark.parametrize("kind", ["needle", "needle_keys", "copy", "induction"])
def test_the_question_repeats_how_the_asked_needle_begins_and_the_answer_goes_on(kind, of_kind):
  for problem in of_kind[kind]:
    begin = problem.starts[problem.asked]
    key = problem.tokens[begin : problem.border]
    answer = problem.tokens[problem.answer :]
    np.testing.assert_array_equal(problem.tokens[problem.answer - len(key) : problem.answer], key)
    there = slice(problem.border, problem.border + len(answer))
    np.testing.assert_array_equal(problem.tokens[there], answer)
    assert occurrences(problem.tokens, key) == 2, "no other needle begins like it"


def test_values_are_asked_for_in_the_order_in_which_they_stand(of_kind, material):
  for problem in of_kind["needle_values"]:
    prompt, answer = np.split(problem.tokens, [problem.answer])
    (comma,) = material.encode(",")
    parts = np.split(answer, np.flatnonzero(answer == comma))
    parts = [part[part != comma] for part in parts]
    assert len(parts) == 3
    assert [occurrences(prompt, part) for part in parts] == [1, 1, 1]
    first = [int(begin) for part in parts for begin in _places(prompt, part)]
    assert first == sorted(first)
    for start, begin in zip(problem.starts, first, strict=True):
      assert start < begin


def _places(tokens, part):
  windows = np.lib.stride_tricks.sliding_window_view(tokens, len(part))
  return np.flatnonzero(np.all(windows == part, axis=1))


def test_a_variable_is_handed_on_by_names_that_stand_before(of_kind, prepared):
  tokenizer = Tokenizer.from_file(str(prepared.folder / TOKENIZER))
  for problem in of_kind["variables"]:
    text = tokenizer.decode(problem.tokens[: problem.answer].tolist())
    wanted = tokenizer.decode(problem.tokens[problem.answer :].tolist()).strip()
    lines = [line.split() for line in text.splitlines()]
    given = {}
    for line in lines:
      if len(line) == 4 and line[0] == "let" and line[2] == "=":
        given[line[1]] = given.get(line[3], line[3])
    asked = lines[-1][3]
    assert given[asked] == wanted
    assert sorted(given.values()) == sorted(list(set(given.values())) * 3), "two chains of three"


def copied(tokens: np.ndarray, at: int) -> int:
  """What followed the last of the longest runs that stand right before `at`, or -1."""
  ends = np.arange(1, at)  # a run may end before any of these
  found = -1
  for back in range(1, at):
    ends = ends[ends >= back]
    ends = ends[tokens[ends - back] == tokens[at - back]]
    if not len(ends):
      return found
    found = int(tokens[ends[-1]])
  return found


NOT_COPIED = ("variables", "needle_values")


@pytest.mark.parametrize("kind", list(KINDS))
def test_copying_what_stood_before_is_enough_where_one_needle_is_repeated(kind, of_kind):
  correct = []
  for problem in of_kind[kind]:
    places = range(problem.answer, len(problem.tokens))
    correct.append(all(copied(problem.tokens, at) == problem.tokens[at] for at in places))
  assert not any(correct) if kind in NOT_COPIED else all(correct)


@pytest.mark.parametrize(("kind", "part"), [("copy", PASSAGE), ("induction", RUN)])
def test_the_depth_is_the_share_of_the_text_before_the_needle(kind, part, of_kind):
  for problem in of_kind[kind]:
    text = len(problem.tokens) - 1 - 4 * part  # BOS; twice in the needle, question and answer
    assert problem.starts[0] - 1 == round(problem.depth * text)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_ends_of_the_depth_are_the_ends_of_the_text(kind, of_kind):
  for problem in of_kind[kind]:
    assert len(problem.starts) == KINDS[kind].needles
    assert list(problem.starts) == sorted(problem.starts)
    if problem.depth == 0:
      assert problem.starts[problem.asked] == 1
      assert problem.asked == 0
    if problem.depth == 1:
      assert problem.asked == (0 if KINDS[kind].in_order else len(problem.starts) - 1)
      assert problem.starts[-1] > problem.answer - 80, "a needle and the question"


@pytest.mark.parametrize("sizes", [SIZES, Sizes(2, 2), Sizes(1, 8), Sizes(4, 1)], ids=str)
def test_needles_are_cut_where_they_should_be(sizes, material):
  sweep = Sweep((400,), (0.0, 0.3, 0.71, 1.0), repeats=3, seed=0)
  straight = list(problems("needle", material, sweep))
  for border in borders(sizes):
    for problem, free in zip(
      problems("needle", material, sweep, border, sizes), straight, strict=True
    ):
      last, first = problem.border - 1, problem.border
      assert (last // sizes.entry == first // sizes.entry) == (border == "inside")
      if sizes.block > 1:
        assert (last // sizes.block != first // sizes.block) == (border == "block")
      assert abs(problem.border - free.border) <= max(sizes.entry, sizes.block)
      np.testing.assert_array_equal(np.sort(problem.tokens), np.sort(free.tokens))
      np.testing.assert_array_equal(problem.tokens[problem.answer :], free.tokens[free.answer :])


def test_only_borders_that_exist_are_offered(material):
  assert list(borders(SIZES)) == ["inside", "entry", "block"]
  assert list(borders(Sizes(2, 2))) == ["inside", "block"]
  assert list(borders(Sizes(1, 8))) == ["entry", "block"]
  assert list(borders(Sizes(2, 1))) == ["inside", "entry"]
  assert list(borders(Sizes(1, 1))) == []
  with pytest.raises(ValueError, match="border is 'block', accepted for .* are anywhere, inside"):
    next(problems("needle", material, SWEEP, "block", Sizes(2, 1)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_problem_depends_on_its_place_and_seed_alone(kind, of_kind, material):
  fewer = SWEEP._replace(lengths=SWEEP.lengths[1:], depths=SWEEP.depths[1:2], repeats=1)
  (alone,) = problems(kind, material, fewer)
  among = of_kind[kind][len(SWEEP.depths) + 1]
  np.testing.assert_array_equal(alone.tokens, among.tokens)
  assert alone[1:] == among[1:]
  (other,) = problems(kind, material, fewer._replace(seed=6))
  assert not np.array_equal(alone.tokens, other.tokens)


def test_what_cannot_be_made_is_a_sentence(material):
  with pytest.raises(ValueError, match="a length of 20 tokens is too short: needles and question"):
    next(problems("needle", material, SWEEP._replace(lengths=(20,))))
  short = material._replace(text_N=material.text_N[:100])
  with pytest.raises(ValueError, match="the validation split has 100"):
    next(problems("needle", short, SWEEP))
  with pytest.raises(ValueError, match=r"depths must lie in 0 ... 1, got \[1.5\]"):
    next(problems("needle", material, SWEEP._replace(depths=(0.5, 1.5))))
  same = material._replace(text_N=np.zeros_like(material.text_N))
  with pytest.raises(ValueError, match="still holds what would be the answer"):
    next(problems("induction", same, SWEEP))


def test_the_text_is_the_held_out_one_in_order(prepared, material):
  whole = material.text_N
  assert 0.9 * prepared.validation.tokens < len(whole) < prepared.validation.tokens
  assert not np.isin(whole, (prepared.bos, prepared.eos, prepared.pad)).any()
  np.testing.assert_array_equal(held_out_text([str(prepared.folder)], 100), whole[:100])
  tokenizer = Tokenizer.from_file(str(prepared.folder / TOKENIZER))
  assert "import" in tokenizer.decode(whole.tolist())
