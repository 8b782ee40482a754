"""The baseline: an interpolated Kneser-Ney bigram over the very targets that the model has.

  p(w | c) = max(n(c, w) - d, 0) / n(c) + d N(c, .) / n(c) q(w)
  q(w) = max(N(., w) - d, 0) / N(., .) + d N(.) / N(., .) / V

n counts pairs; N(c, .) are the distinct tokens after c, N(., w) the distinct tokens before w,
N(., .) the distinct pairs, N(.) the tokens with N(., w) > 0. After an unseen c, p is q.
Source: Kneser and Ney 1995, interpolated as in Chen and Goodman 1998; the last term is ours and
gives every token mass. Legend: P distinct pairs, V vocabulary, N any number of tokens.
"""

from collections.abc import Iterable

import numpy as np

from data.pipeline import Batch
from deepseek_jax.layout import Layout

DISCOUNT = 0.75  # d; the constant that Kneser-Ney is usually given


class Bigram:
  """Probabilities from counted pairs."""

  def __init__(self, context_N: np.ndarray, target_N: np.ndarray, vocab: int):
    """Counts pairs of a token and the one that follows it; at least one."""
    self._vocab = vocab
    keys = context_N.astype(np.int64) * vocab + target_N
    self._key_P, self._count_P = np.unique(keys, return_counts=True)
    pairs = len(self._key_P)
    context_P, target_P = np.divmod(self._key_P, vocab)
    self._total_V = np.bincount(context_P, self._count_P, vocab)
    self._followers_V = np.bincount(context_P, minlength=vocab)
    before_V = np.bincount(target_P, minlength=vocab)
    spread = DISCOUNT * np.count_nonzero(before_V) / pairs
    self._lower_V = np.maximum(before_V - DISCOUNT, 0) / pairs + spread / vocab

  def probability(self, context_N: np.ndarray, target_N: np.ndarray) -> np.ndarray:
    """[N] float64 p(target | context)."""
    keys = context_N.astype(np.int64) * self._vocab + target_N
    place = np.minimum(np.searchsorted(self._key_P, keys), len(self._key_P) - 1)
    count_N = np.where(self._key_P[place] == keys, self._count_P[place], 0)
    total_N = self._total_V[context_N]
    own_N = np.maximum(count_N - DISCOUNT, 0) / np.maximum(total_N, 1)
    backoff_N = DISCOUNT * self._followers_V[context_N] / np.maximum(total_N, 1)
    return own_N + np.where(total_N > 0, backoff_N, 1.0) * self._lower_V[target_N]

  def nats(self, batches: Iterable[Batch]) -> tuple[float, int]:
    """Sum of -log p over the targets of all batches, and how many targets there are."""
    total, targets = 0.0, 0
    for batch in batches:
      context_N, target_N = target_pairs(batch.layout)
      total -= float(np.log(self.probability(context_N, target_N)).sum())
      targets += len(target_N)
    return total, targets


def count_bigrams(batches: Iterable[Batch], vocab: int) -> Bigram:
  """Counts the targets of the given rows, each row once.

  Counting a row again when training repeats it would only weaken the baseline: a discount of less
  than one count is lost in counts that are all multiplied.
  """
  seen: set[str] = set()
  pairs = []
  for batch in batches:
    fresh = [b for b, record in enumerate(batch.records) if record and record not in seen]
    seen.update(batch.records)
    pairs.append(target_pairs(batch.layout, fresh))
  context_N, target_N = (np.concatenate(column) for column in zip(*pairs, strict=True))
  return Bigram(context_N, target_N, vocab)


def target_pairs(layout: Layout, rows: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
  """[N] token and [N] the target that follows it, wherever the loss has weight."""
  chosen = slice(None) if rows is None else rows
  slots_BT = np.maximum(layout.decoder_slots[chosen], 0)
  context_BT = np.take_along_axis(layout.tokens[chosen], slots_BT, axis=1)
  weighted_BT = layout.weights[chosen] > 0
  return context_BT[weighted_BT], layout.targets[chosen][weighted_BT]
