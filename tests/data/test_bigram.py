"""The baseline is a probability, and the one that its formula says."""

import math
from collections import Counter

import numpy as np
import pytest

from data.bigram import DISCOUNT, Bigram, count_bigrams, target_pairs
from data.pipeline import Batch, open_pipeline, open_validation, validation_split
from deepseek_jax.layout import Document, build_layout

VOCAB = 40


def pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Skewed pairs; the last tokens of the vocabulary never occur."""
  random = np.random.default_rng(1)
  context = random.geometric(0.15, count) % (VOCAB - 5)
  return context, (context * 3 + random.geometric(0.3, count)) % (VOCAB - 5)


def by_formula(context: int, target: int, counted: list[tuple[int, int]]) -> float:
  """The formula of the module, term by term over dictionaries."""
  n, distinct = Counter(counted), set(counted)
  tokens = {w for _, w in distinct}
  before = sum(w == target for _, w in distinct)
  lower = max(before - DISCOUNT, 0) / len(distinct)
  lower += DISCOUNT * len(tokens) / len(distinct) / VOCAB
  total = sum(c == context for c, _ in counted)
  if not total:
    return lower
  followers = sum(c == context for c, _ in distinct)
  own = max(n[context, target] - DISCOUNT, 0) / total
  return own + DISCOUNT * followers / total * lower


@pytest.mark.parametrize("count", [1, 30, 3000])
def test_probabilities_sum_to_one_after_every_token(count):
  model = Bigram(*pairs(count), VOCAB)
  for context in range(VOCAB):
    p = model.probability(np.full(VOCAB, context), np.arange(VOCAB))
    assert p.min() > 0
    assert p.sum() == pytest.approx(1, abs=1e-12)


def test_probabilities_are_those_of_the_formula():
  context, target = pairs(200)
  counted = list(zip(context.tolist(), target.tolist(), strict=True))
  every = [(c, w) for c in range(VOCAB) for w in range(VOCAB)]
  got = Bigram(context, target, VOCAB).probability(
    *(np.array(side) for side in zip(*every, strict=True))
  )
  expected = [by_formula(c, w, counted) for c, w in every]
  np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_pairs_stop_at_documents_and_go_on_over_cuts():
  documents = [Document(np.array([5, 6, 7])), Document(np.array([8, 9]), next_token=3)]
  layout = build_layout(documents, slots=8, ratios=())
  context, target = target_pairs(layout)
  assert list(zip(context, target, strict=True)) == [(5, 6), (6, 7), (8, 9), (9, 3)]


def test_a_row_counts_once_however_often_it_is_trained_on():
  layout = build_layout([Document(np.array([1, 2, 1, 3]))], slots=4, ratios=())
  other = build_layout([Document(np.array([2, 2, 3, 3]))], slots=4, ratios=())
  batches = [Batch(layout, ("a",)), Batch(other, ("b",)), Batch(layout, ("a",))]
  once, repeated = count_bigrams(batches[:2], 5), count_bigrams(batches, 5)
  every = np.divmod(np.arange(25), 5)
  np.testing.assert_array_equal(once.probability(*every), repeated.probability(*every))


def test_the_baseline_beats_chance_on_text_it_has_not_seen(config_of, prepared):
  pipeline = open_pipeline(config_of(), ratios=(), engram=None)
  model = count_bigrams((next(pipeline) for _ in range(prepared.train.rows // 4)), prepared.vocab)
  nats, targets = model.nats(open_validation(config_of(), ratios=(), engram=None))
  assert targets == prepared.validation.targets
  assert nats / targets < 0.75 * math.log(prepared.vocab)
  whole = validation_split(config_of())
  assert whole.bits_per_byte(nats / targets) == pytest.approx(nats / math.log(2) / whole.bytes)
