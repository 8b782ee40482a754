"""Learned tokens of two layouts of the same rows are paired, wherever hits and cuts put them."""

import numpy as np

from data.conversation import Conversation
from data.replay import document_of
from deepseek_jax.layout import NO_HIT, Replay, build_layout, stack_layouts
from train.replay_report import BUCKETS
from train.served import match_slots

WINDOW = 4
# A row of two conversations with hits, a row of one with a response of 150 tokens, an empty row.
ROWS = [
  ([((10, 14), (22, 25)), ((3, 6), (14, 15))], [[8, 20], [NO_HIT, 10]]),
  ([((20, 170),)], [[12]]),
  ([], []),
]


def conversation(turns, number) -> Conversation:
  """Every token is another one; the second token of a response is not learned."""
  tokens = np.arange(turns[-1][1], dtype=np.int32) + 1000 * number
  mask = np.zeros(len(tokens), bool)
  for begin, end in turns:
    mask[begin:end] = True
    mask[begin + 1 : begin + 2] = False
  return Conversation(tokens, mask, turns)


def layouts():
  exact, replayed = [], []
  for turns, hits in ROWS:
    documents = [document_of(conversation(own, n)) for n, own in enumerate(turns)]
    exact.append(build_layout(documents, slots=192, ratios=(1, 2)))
    replay = Replay(window=WINDOW, decoder_slots=160, hit_multiple=2)
    replayed.append(build_layout(documents, turns, hits, slots=208, ratios=(1, 2), replay=replay))
  return stack_layouts(exact), stack_layouts(replayed)


def test_paired_tokens_are_the_same_and_have_the_same_target():
  exact, replayed = layouts()
  learned_BT = replayed.weights > 0
  slot_BT = match_slots(exact, replayed, list(BUCKETS.values())).slot_BT
  at = lambda x_BS, slot_BT: np.take_along_axis(x_BS, slot_BT, axis=1)[learned_BT]
  start_BT = np.maximum(replayed.decoder_slots, 0)
  for name in ("tokens", "positions", "document"):
    assert np.array_equal(
      at(getattr(exact, name), slot_BT), at(getattr(replayed, name), start_BT)
    ), name
  assert np.array_equal(at(exact.targets, slot_BT), replayed.targets[learned_BT])
  assert np.all(at(exact.weights, slot_BT) == 1)
  assert learned_BT.sum() == (exact.weights > 0).sum() > 150, "and every token is paired"
  assert np.any(slot_BT[learned_BT] != start_BT[learned_BT]), "copies have moved some"


def test_tokens_are_counted_from_the_beginning_of_their_response():
  exact, replayed = layouts()
  bucket_BT = match_slots(exact, replayed, list(BUCKETS.values())).bucket_BT
  count = lambda row: np.bincount(bucket_BT[row][replayed.weights[row] > 0], minlength=3).tolist()
  assert list(BUCKETS) == ["first_16", "to_128", "beyond_128"]
  assert count(0) == [3 + 2 + 2 + 1, 0, 0]
  assert count(1) == [15, 112, 22]  # of 150, the second is not learned
  assert count(2) == [0, 0, 0]
