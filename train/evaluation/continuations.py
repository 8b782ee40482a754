"""Texts behind a common beginning, as tokens of which the likelihood is asked for."""

from collections.abc import Sequence

import numpy as np

from train.evaluation.model import EvaluatedModel, Scored


def continuations(model: EvaluatedModel, context: str, texts: Sequence[str]) -> list[Scored]:
  """The context with each of the texts behind it, asked for from where they part.

  Each is one text to the tokenizer, which may join the end of the context with what follows. All
  are asked for from the first token on that is not the same in all of them and in the context
  alone, so that their likelihoods, given what is before, are of the same text and compare.

  Args:
    context: may be empty.
    texts: none empty.
  """
  whole = [model.encode(context + text) for text in texts]
  start = _common([model.encode(context), *whole])
  start = min(start, *(len(tokens) - 1 for tokens in whole))
  return [Scored(tokens, max(1, start)) for tokens in whole]


def _common(sequences: Sequence[np.ndarray]) -> int:
  """How many tokens all begin with."""
  shortest = min(map(len, sequences))
  together_XN = np.stack([tokens[:shortest] for tokens in sequences])
  differs_N = np.any(together_XN != together_XN[0], axis=0)
  return int(np.argmax(differs_N)) if differs_N.any() else shortest
