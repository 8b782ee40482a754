"""`--fail-if`: what is understood, what it refers to, and when it holds."""

import math

import pytest

from train.evaluation.conditions import Condition, failed, problems, read_condition

CHOICE = "multiple_choice:a.b.jsonl"
METRICS = {"perplexity": ("bits_per_byte", "top1"), CHOICE: ("accuracy",)}


@pytest.mark.parametrize(
  ("text", "condition"),
  [
    ("bits_per_byte>2.5", Condition("bits_per_byte", ">", 2.5)),
    (" perplexity.top1 <= 1e-2 ", Condition("perplexity.top1", "<=", 0.01)),
    (
      "multiple_choice:a.b.jsonl.accuracy<0",
      Condition("multiple_choice:a.b.jsonl.accuracy", "<", 0),
    ),
    ("humaneval.pass@10 >= .5", Condition("humaneval.pass@10", ">=", 0.5)),
  ],
)
def test_a_condition_is_understood(text, condition):
  assert read_condition(text) == condition
  assert problems([condition], METRICS | {"humaneval": ("pass@10",)}) == []


@pytest.mark.parametrize(
  "text", ["", ">1", "a", "a>", "a = 1", "a > b", "a > nan", "a > inf", "a >> 1"]
)
def test_what_is_no_condition_is_told_what_one_is(text):
  sentence = read_condition(text)
  assert (
    sentence == f"--fail-if is {text!r}, accepted is 'task.metric > number' with >, <, >= or <=."
  )


def test_an_unknown_metric_gets_the_nearest_and_one_of_two_tasks_must_be_named():
  unknown = problems([Condition("bits_per_bite", ">", 1)], METRICS)
  assert unknown == [
    "--fail-if bits_per_bite is no metric of these tasks; the nearest is bits_per_byte."
  ]
  metrics = METRICS | {"exact_match:c": ("accuracy",)}
  (both,) = problems([Condition("accuracy", "<", 1)], metrics)
  assert both.endswith(
    "multiple_choice:a.b.jsonl.accuracy, exact_match:c.accuracy; name one of them."
  )


def test_what_holds_is_told_and_a_number_that_is_none_holds():
  results = {"perplexity": {"bits_per_byte": 2.0, "top1": None}}
  conditions = [Condition("bits_per_byte", ">", limit) for limit in (1.5, 2.0, 2.5)]
  assert failed(conditions, results) == [
    "perplexity.bits_per_byte is 2: --fail-if bits_per_byte > 1.5 holds."
  ]
  assert len(failed([Condition("top1", "<", 0.0)], results)) == 1
  assert Condition("x", ">", 0).holds(math.inf) and Condition("x", "<", 0).holds(math.nan)
  assert failed([Condition("accuracy", "<", 1)], results) == []
