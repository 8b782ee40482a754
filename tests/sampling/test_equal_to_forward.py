"""What comes out of prefill and decode is what one forward of the trained model gives."""

import dataclasses

import jax
import numpy as np
import pytest

from deepseek_jax.model import Model, logits
from deepseek_jax.sampling.cache import without_windows
from deepseek_jax.sampling.sampler import Sampler
from tests.sampling.small_model import (
  CFG,
  HASHING,
  S,
  W,
  assert_close,
  layout_of,
  random_tokens,
  random_variables,
  with_copies,
  with_early_exit,
)

LENGTHS = 40, 31  # of two sequences; odd, so that pairs end half full
A, C = (random_tokens(seed, n) for seed, n in zip((2, 3), LENGTHS, strict=True))


def parts(starts, ends):
  return [t[a:b] for t, a, b in zip((A, C), starts, ends, strict=True)]


def decode_all(sampler, cache, last_BV, done):
  """Feeds what is left of both sequences: logits by position, of those that were computed."""
  out = np.full((2, max(LENGTHS), CFG.vocab), np.nan, np.float32)
  done = np.array(done)
  out[np.arange(2), done - 1] = last_BV
  while (active := done < LENGTHS).any():
    tokens = [t[min(n, len(t) - 1)] for t, n in zip((A, C), done, strict=True)]
    cache, logits_BV = sampler.step(cache, tokens, active)
    out[active, done[active]] = np.asarray(logits_BV)[active]
    done = done + active
  return out


def run(sampler, prompts, **options):
  cache = sampler.new_cache(2, S)
  cache, last_BV = sampler.prefill(cache, parts((0, 0), prompts), **options)
  return decode_all(sampler, cache, last_BV, prompts)


def assert_same(got, want, prompts, shift=0):
  """From each prompt's last token on; `want` may hold the sequence some slots later."""
  for b, (start, end) in enumerate(zip(prompts, LENGTHS, strict=True)):
    there = want[b, start - 1 + shift : end + shift]
    assert_close(got[b, start - 1 : end], there, f"sequence {b}")


@pytest.mark.parametrize("prompts", [(1, 1), (13, 8), (31, 30)], ids=str)
def test_exact_prefill_and_steps_equal_one_forward(small, prompts):
  got = run(small.sampler, prompts, exact=True)
  assert_same(got, small.forward(layout_of(A, C)), prompts)


@pytest.mark.parametrize("prompts", [(1, W), (W - 1, 3)], ids=str)
def test_early_exit_is_exact_for_prompts_up_to_the_window(small, prompts):
  got = run(small.sampler, prompts)
  assert_same(got, small.forward(layout_of(A, C)), prompts)


def test_early_exit_is_the_forward_whose_decoder_starts_a_window_before_the_end(small):
  prompts = 29, 14
  got = run(small.sampler, prompts)
  starts = [n - W for n in prompts]
  assert_same(got, small.forward(with_early_exit(layout_of(A, C), starts)), prompts)
  exact = small.forward(layout_of(A, C))
  assert np.abs(got[0, 28] - exact[0, 28]).max() > 1e-4 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_of_any_size_give_the_same(small, chunk):
  sampler = Sampler(CFG, small.variables, HASHING, packed=False, chunk=chunk)
  prompts = 29, 14
  want = small.forward(with_early_exit(layout_of(A, C), [n - W for n in prompts]))
  _, last_BV = sampler.prefill(sampler.new_cache(2, S), parts((0, 0), prompts))
  assert_close(last_BV, [want[0, 28], want[1, 13]])


def test_a_prompt_in_two_parts_is_the_prompt(small):
  """With live windows: every layer on both parts, and the second through the tail."""
  middle, prompts = (13, 10), (29, 14)
  cache, _ = small.sampler.prefill(small.sampler.new_cache(2, S), parts((0, 0), middle), exact=True)
  cache, last_BV = small.sampler.prefill(cache, parts(middle, prompts), exact=True)
  want = small.forward(layout_of(A, C))
  assert_same(decode_all(small.sampler, cache, last_BV, prompts), want, prompts)

  # A second part up to the window goes on with the decoder's windows, so it is exact as well.
  prompts = middle[0] + W, middle[1] + 3
  cache, _ = small.sampler.prefill(small.sampler.new_cache(2, S), parts((0, 0), middle), exact=True)
  cache, last_BV = small.sampler.prefill(cache, parts(middle, prompts))
  assert_same(decode_all(small.sampler, cache, last_BV, prompts), want, prompts)


@pytest.mark.parametrize("prompts", [(25, 30), (26, 15)], ids=str)
def test_a_prefix_without_windows_goes_on_as_a_layout_with_copies_says(small, prompts):
  """Inputs shorter and longer than the window; the copies see nothing before them."""
  hits = 20, 14
  cache, _ = small.sampler.prefill(small.sampler.new_cache(2, S), parts((0, 0), hits))
  cache = without_windows(cache)
  held, new = parts((0, 0), hits), parts(hits, prompts)
  cache, last_BV = small.sampler.resume(cache, held, new)
  got = decode_all(small.sampler, cache, last_BV, prompts)
  layout = with_copies((A, C), hits)
  want = small.forward(with_early_exit(layout, prompts))  # slots: W copies, minus the window
  assert_same(got, want, prompts, shift=W)
  exact = small.forward(layout_of(A, C))
  assert np.abs(got[0, 30] - exact[0, 30]).max() > 1e-4 * np.abs(exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("hits", [(19, 13), (21, 20)], ids=str)
def test_a_prefix_may_end_between_the_tokens_of_a_pair(hits):
  """The pair is made of the copy before the hit and of the token behind it.

  Without a pool, whose blocks a layout with copies would cut elsewhere.
  """
  cfg = dataclasses.replace(CFG, indexer=dataclasses.replace(CFG.indexer, pool_source=None))
  variables, prompts = random_variables(cfg), (30, 22)
  sampler = Sampler(cfg, variables, HASHING, packed=False, chunk=8)
  cache, _ = sampler.prefill(sampler.new_cache(2, S), parts((0, 0), hits))
  held, new = parts((0, 0), hits), parts(hits, prompts)
  cache, last_BV = sampler.resume(without_windows(cache), held, new)
  got = decode_all(sampler, cache, last_BV, prompts)
  layout = with_early_exit(with_copies((A, C), hits), prompts)
  assert_same(got, logits(Model(cfg).apply(variables, layout)), prompts, shift=W)


def test_what_a_cache_cannot_do_is_refused_before_it_is_touched(small):
  sampler, new = small.sampler, [A[:1], C[:1]]
  cache = sampler.new_cache(2, S)
  with pytest.raises(ValueError, match=f"room for {S} tokens, {S + 1} are needed"):
    sampler.prefill(cache, [np.zeros(S + 1, np.int32), C])
  with pytest.raises(ValueError, match=r"prompts \[1\] are empty"):
    sampler.prefill(cache, [A, C[:0]])
  with pytest.raises(ValueError, match=r"held has sequences of \[20, 20\] tokens, the cache of"):
    sampler.resume(cache, parts((0, 0), (20, 20)), new)
  holding = cache._replace(position=np.array([W, S]))
  with pytest.raises(ValueError, match=rf"\[{W}\] tokens, accepted are more than {W}"):
    sampler.resume(holding._replace(position=np.array([W, 20])), parts((0, 0), (W, 20)), new)
  with pytest.raises(ValueError, match=f"room for {S} tokens, {S + 1} are needed"):
    sampler.step(holding, [0, 0], [True, True])


@pytest.mark.slow
def test_a_sequence_in_a_batch_is_the_sequence_alone(small):
  prompts = 29, 14
  together = run(small.sampler, prompts)
  for b, (tokens, start) in enumerate(zip((A, C), prompts, strict=True)):
    cache, last_BV = small.sampler.prefill(small.sampler.new_cache(1, S), [tokens[:start]])
    for position in range(start, len(tokens) + 1):
      assert_close(last_BV[0], together[b, position - 1], f"sequence {b}, {position}")
      if position < len(tokens):
        cache, last_BV = small.sampler.step(cache, tokens[position : position + 1], [True])


def test_a_step_works_in_the_cache_that_it_is_given(small):
  """Every buffer is handed over, and none but the program's own remains."""
  before, _ = small.sampler.prefill(
    small.sampler.new_cache(2, S), parts((0, 0), (5, 3)), exact=True
  )
  after, _ = small.sampler.step(before, [1, 2], [True, False])
  assert all(x.is_deleted() for x in jax.tree.leaves(before))
  assert after.position.tolist() == [6, 3]
