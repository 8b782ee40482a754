"""Files of problems: what is wrong with them is told with file, line and reason, all at once."""

import gzip
import json

import pytest

from train.errors import UsageError
from train.evaluation import exact_match, humaneval, multiple_choice
from train.evaluation.jsonl import LISTED, read_problems

GOOD = {"context": "one plus one is", "choices": [" two", " three"], "answer": 0}
MATCH = {"prompt": "a", "answer": ["b", "c"], "stop": ["."], "max_new_tokens": 3}


def write(path, *lines):
  path.write_text(
    "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
  )
  return str(path)


def problems_of(make, file):
  with pytest.raises(UsageError) as caught:
    make("task", file, None)
  return caught.value.problems


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("{", "it is no JSON (Expecting property name enclosed in double quotes"),
    ("[1]", "it is no JSON object."),
    (GOOD | {"context": "\ud800"}, "it holds half of a surrogate pair, which is no text."),
    (GOOD | {"context": 1}, "context must be text, got 1."),
    ({"context": "", "answer": 0}, "choices is missing."),
    (GOOD | {"choices": "ab"}, 'choices must be a list of texts that are not empty, got "ab".'),
    (GOOD | {"choices": ["a", ""]}, "choices must be a list of texts that are not empty"),
    (GOOD | {"choices": ["a", "a"]}, "choices must be two or more, each another one."),
    (GOOD | {"choices": ["a"]}, "choices must be two or more, each another one."),
    (GOOD | {"answer": 2}, "answer is 2, but the last choice is 1."),
    (GOOD | {"answer": True}, "answer must be the number of a choice, from 0, got true."),
  ],
)
def test_a_line_that_is_no_problem_is_named_with_its_reason(line, reason, tmp_path):
  file = write(tmp_path / "choices.jsonl", GOOD, "", line)
  (problem,) = problems_of(multiple_choice.make, file)
  assert problem.startswith(f"{file}, line 3: {reason}")


def test_every_line_is_told_up_to_a_number(tmp_path):
  file = write(tmp_path / "many.jsonl", *[GOOD | {"answer": 9}] * (LISTED + 2))
  problems = problems_of(multiple_choice.make, file)
  assert len(problems) == LISTED + 1
  assert problems[-1] == f"2 more lines of {file}."


def test_files_that_cannot_be_read_or_hold_nothing(tmp_path):
  assert "No such file" in problems_of(exact_match.make, str(tmp_path / "none"))[0]
  assert "Is a directory" in problems_of(exact_match.make, str(tmp_path))[0]
  empty = write(tmp_path / "empty.jsonl")
  assert problems_of(exact_match.make, empty) == (f"{empty} holds no problem.",)
  bad = tmp_path / "bad.jsonl.gz"
  bad.write_bytes(b"no gzip")
  assert "cannot be read" in problems_of(exact_match.make, str(bad))[0]
  text = tmp_path / "latin.jsonl"
  text.write_bytes('{"prompt": "ä", "answer": "a"}\n'.encode("latin-1"))
  assert problems_of(exact_match.make, str(text))[0].startswith(f"{text}, line 1: it is no JSON")


def test_other_tasks_check_their_fields(tmp_path):
  file = write(tmp_path / "match.jsonl", MATCH, MATCH | {"stop": [], "max_new_tokens": 0})
  (problem,) = problems_of(exact_match.make, file)
  assert "stop must be a list" in problem and "max_new_tokens must be a number of tokens" in problem
  (problem,) = problems_of(humaneval.make, write(tmp_path / "h.jsonl", {"prompt": "a"}))
  assert problem.count("is missing") == 4


def test_a_good_file_may_be_compressed(tmp_path):
  plain = tmp_path / "match.jsonl"
  write(plain, MATCH, MATCH)
  compressed = tmp_path / "match.jsonl.gz"
  compressed.write_bytes(gzip.compress(plain.read_bytes()))
  for file in (plain, compressed):
    assert read_problems("task", str(file), {}).records == [MATCH, MATCH]
