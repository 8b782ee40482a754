"""Rows are laid out as a server meets them: what is a response, what a prefix, what is left out."""

import numpy as np
import pytest

from configs import nano
from data.config import ReplayConfig
from data.conversation import Conversation
from data.source import Row
from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import NO_HIT, Document
from train.evaluation import served_rows
from train.evaluation.served_rows import RowShape
from train.served import match_slots

CFG = ModelConfig.from_dict(nano.get_config().model.to_dict())
W = CFG.attention.window  # 8
REPLAY = ReplayConfig(max_hits=2, hit_multiple=served_rows.hit_multiple(CFG))
SHAPE = RowShape(CFG, None, slots=64, unit=2)


def text_row(number: int, *lengths: int) -> Row:
  tokens = lambda n: np.arange(n, dtype=np.int32) + 10 * number
  return Row(f"text:{number}", [Document(tokens(n), next_token=5) for n in lengths], (), number)


def chat_row(number: int) -> Row:
  mask = np.zeros(50, bool)
  turns = ((10, 15), (30, 40))
  for begin, end in turns:
    mask[begin:end] = True
  return Row("chat", [Conversation(np.arange(50, dtype=np.int32), mask, turns)], (), number)


def test_a_document_answers_with_its_second_half_and_a_chat_with_its_answers():
  assert served_rows.early_exit(text_row(0, 40, 1, 7)).turns == [((20, 40),), (), ((3, 7),)]
  assert served_rows.early_exit(chat_row(0)).turns == [((10, 15), (30, 40))]


@pytest.mark.parametrize("seed", range(4))
def test_a_prefix_ends_before_its_response_on_a_block_and_has_a_window(seed):
  rows = [text_row(n, *own) for n, own in enumerate([(60,), (30, 30), (12, 9, 40)])]
  for row in [*rows, chat_row(3), chat_row(4)]:
    plan = served_rows.continued(row, REPLAY, W, seed)
    hits = [hit for own in plan.cuts for hit in own]
    assert 1 <= len(hits) <= REPLAY.max_hits
    assert NO_HIT not in hits, "a response without a prefix is context"
    for own, cuts in zip(plan.turns, plan.cuts, strict=True):
      for (begin, _), hit in zip(own, cuts, strict=True):
        assert W < hit < begin
        assert hit % REPLAY.hit_multiple == 0


def test_prefixes_depend_on_row_and_seed():
  hits = lambda row, seed: served_rows.continued(row, REPLAY, W, seed).cuts
  assert hits(text_row(0, 64), 1) == hits(text_row(0, 64), 1)
  found = {str(hits(text_row(n, 64), seed)) for n in range(4) for seed in range(4)}
  assert len(found) > 4


def test_layouts_come_in_full_calls_and_learn_the_responses_alone():
  rows = [text_row(0, 40, 20), chat_row(1), text_row(2, 64)]
  for plans in (
    [served_rows.early_exit(row) for row in rows],
    [served_rows.continued(row, REPLAY, W, 0) for row in rows],
  ):
    pairs = list(SHAPE.pairs(plans, REPLAY, rows=2))
    assert [len(pair.served.tokens) for pair in pairs] == [2, 2], "an empty row fills the last"
    assert len({pair.served.weights.shape for pair in pairs}) == 1
    learned = np.concatenate([(pair.served.weights > 0).sum(axis=1) for pair in pairs])
    counts = [sum(end - begin for own in plan.turns for begin, end in own) for plan in plans]
    assert learned.tolist() == [*counts, 0]
    for pair in pairs:
      match = match_slots(pair.exact, pair.served, [4, 2**31])
      at = np.take_along_axis(pair.exact.targets, match.slot_BT, axis=1)
      chosen = pair.served.weights > 0
      np.testing.assert_array_equal(at[chosen], pair.served.targets[chosen])


def test_a_device_of_a_row_holds_a_window():
  shape = SHAPE._replace(unit=2 * 4)  # 4 devices along the row
  (pair,) = shape.pairs([served_rows.early_exit(text_row(0, 4))], REPLAY, rows=1)
  assert pair.served.weights.shape[1] // 4 >= W - 1
