"""What comes out of prefill and decode is what one forward of the trained model gives."""

import numpy as np
import pytest

from deepseek_jax.sampling.sampler import Sampler
from tests.sampling.small_model import (
  CFG,
  HASHING,
  W,
  assert_close,
  layout_of,
  random_tokens,
  with_early_exit,
)

LENGTHS = 40, 31  # of two sequences; odd, so that pairs end half full
A, C = (random_tokens(seed, length) for seed, length in enumerate(LENGTHS))


def decode_all(sampler, cache, last_BV, sequences, done):
  """Feeds what is left of each sequence; logits by position, NaN where none were computed."""
  total = max(map(len, sequences))
  out = np.full((len(sequences), total, last_BV.shape[1]), np.nan, np.float32)
  done = np.array(done)
  out[np.arange(len(sequences)), done - 1] = last_BV
  while (active := done < [len(t) for t in sequences]).any():
    tokens = [t[min(n, len(t) - 1)] for t, n in zip(sequences, done, strict=True)]
    cache, logits_BV = sampler.step(cache, tokens, active)
    out[active, done[active]] = np.asarray(logits_BV)[active]
    done = done + active
  return out


def run(sampler, sequences, prompts, **options):
  cache = sampler.new_cache(len(sequences), 48)
  given = [t[:n] for t, n in zip(sequences, prompts, strict=True)]
  cache, last_BV = sampler.prefill(cache, given, **options)
  return decode_all(sampler, cache, last_BV, sequences, prompts)


def assert_same(got, want, prompts):
  for b, start in enumerate(prompts):
    assert_close(got[b, start - 1 : LENGTHS[b]], want[b, start - 1 : LENGTHS[b]], f"sequence {b}")


@pytest.mark.parametrize("prompts", [(1, 1), (13, 8), (31, 30)], ids=str)
def test_exact_prefill_and_steps_equal_one_forward(small, prompts):
  got = run(small.sampler, (A, C), prompts, exact=True)
  assert_same(got, small.forward(layout_of(A, C)), prompts)


@pytest.mark.parametrize("prompts", [(1, W), (W - 1, 3)], ids=str)
def test_early_exit_is_exact_for_prompts_up_to_the_window(small, prompts):
  got = run(small.sampler, (A, C), prompts)
  assert_same(got, small.forward(layout_of(A, C)), prompts)


def test_early_exit_is_the_forward_whose_decoder_starts_a_window_before_the_end(small):
  prompts = 29, 14
  got = run(small.sampler, (A, C), prompts)
  starts = [n - W for n in prompts]
  assert_same(got, small.forward(with_early_exit(layout_of(A, C), starts)), prompts)
  exact = small.forward(layout_of(A, C))
  assert np.abs(got[0, 28] - exact[0, 28]).max() > 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_any_size_give_the_same(small, chunk):
  sampler = Sampler(CFG, small.variables, HASHING, packed=False, chunk=chunk)
  prompts = 29, 14
  starts = [n - W for n in prompts]
  want = small.forward(with_early_exit(layout_of(A, C), starts))
  cache = sampler.new_cache(2, 48)
  cache, last_BV = sampler.prefill(cache, (A[:29], C[:14]))
  assert_close(last_BV, [want[0, 28], want[1, 13]])
