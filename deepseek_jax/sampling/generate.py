"""Writing on from prompts, a token of every text at a time.

Legend: B sequences, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from deepseek_jax.sampling.choose_token import choose_token
from deepseek_jax.sampling.sampler import Sampler
from deepseek_jax.sharding import to_host


class Sampling(NamedTuple):
  """How tokens are chosen, see choose_token."""

  temperature: float = 1.0
  top_p: float = 1.0
  seed: int = 0


def generate(
  sampler: Sampler,
  prompts: Sequence[np.ndarray],
  sampling: Sampling,
  *,
  max_new_tokens: int,
  end: int | None = None,
  vocab: int | None = None,
  numbers: Sequence[int] | None = None,
  exact: bool = False,
) -> Iterator[list[int | None]]:
  """The next token of every text, until all have ended.

  Args:
    prompts: int32 tokens, none empty.
    end: token that ends a text; it is given out too.
    vocab: tokens from this id on are never drawn; None allows all that the model has.
    numbers: of the texts, for their random numbers; None counts from 0.
    exact: see Sampler.prefill.

  Yields: for each text its next token, None after its end.
  """
  length_B = np.array([len(prompt) for prompt in prompts], np.int32)
  number_B = np.arange(len(prompts)) if numbers is None else np.asarray(numbers)
  cache = sampler.new_cache(len(prompts), int(length_B.max()) + max_new_tokens)
  cache, logits_BV = sampler.prefill(cache, prompts, exact=exact)

  def step(tokens_B: np.ndarray, active_B: np.ndarray) -> jax.Array:
    nonlocal cache
    cache, logits_BV = sampler.step(cache, tokens_B, active_B)
    return logits_BV

  behind = Behind(logits_BV, length_B, number_B)
  yield from go_on(step, behind, sampling, max_new_tokens=max_new_tokens, end=end, vocab=vocab)


class Behind(NamedTuple):
  """Where texts go on."""

  logits_BV: jax.Array  # float32, of their last tokens
  length_B: np.ndarray  # tokens so far
  number_B: np.ndarray  # of the texts, for their random numbers


def go_on(
  step: Callable[[np.ndarray, np.ndarray], jax.Array],
  behind: Behind,
  sampling: Sampling,
  *,
  max_new_tokens: int,
  end: int | None = None,
  vocab: int | None = None,
) -> Iterator[list[int | None]]:
  """As `generate`, with a step that appends tokens [B] to active texts [B] and returns logits."""
  active_B, logits_BV = np.ones(len(behind.length_B), bool), behind.logits_BV
  for count in range(max_new_tokens):
    tokens_B = to_host(
      choose_token(
        logits_BV[:, :vocab],
        sampling.seed,
        behind.number_B,
        behind.length_B + count,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
      )
    )
    yield [int(t) if active else None for t, active in zip(tokens_B, active_B, strict=True)]
    active_B = active_B & (tokens_B != end)
    if not active_B.any() or count == max_new_tokens - 1:
      return
    logits_BV = step(tokens_B, active_B)
