"""Drawing tokens: the nucleus, the temperature, and whose random numbers they are."""

import numpy as np

from deepseek_jax.sampling.choose_token import choose_token

V, COUNT = 6, 8000
LOGITS_V = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.15, 0.05], np.float32))


def draws(count, logits_V=LOGITS_V, **options):
  logits_BV = np.broadcast_to(logits_V, (count, V))
  return np.asarray(choose_token(logits_BV, 7, np.arange(count), np.full(count, 3), **options))


def shares(tokens):
  return np.bincount(tokens, minlength=V) / len(tokens)


def test_tokens_come_with_their_probability():
  np.testing.assert_allclose(shares(draws(COUNT)), np.exp(LOGITS_V), atol=0.02)
  warm = np.exp(LOGITS_V / 2) / np.exp(LOGITS_V / 2).sum()
  np.testing.assert_allclose(shares(draws(COUNT, temperature=2.0)), warm, atol=0.02)


def test_the_nucleus_is_the_smallest_set_with_that_probability():
  # 0.4 + 0.25 reach 0.65, which is not more than is asked for; 0.66 needs the next.
  np.testing.assert_allclose(shares(draws(COUNT, top_p=0.649))[[1, 3]].sum(), 1)
  kept = shares(draws(COUNT, top_p=0.66))
  np.testing.assert_allclose(kept[[1, 3, 4]], np.array([0.4, 0.25, 0.15]) / 0.8, atol=0.02)
  assert kept[[0, 2, 5]].sum() == 0
  assert set(draws(COUNT, top_p=1e-6)) == {1}


def test_no_temperature_takes_the_likeliest_and_of_equals_the_lowest():
  assert set(draws(COUNT, temperature=0)) == {1}
  assert set(draws(COUNT, np.zeros(V, np.float32), temperature=0)) == {0}


def test_a_draw_depends_on_seed_text_and_position_and_not_on_its_neighbours():
  logits_BV = np.random.default_rng(0).normal(size=(8, V)).astype(np.float32)
  number, position = np.arange(8), np.arange(8) + 5
  together = np.asarray(choose_token(logits_BV, 1, number, position))
  for b in range(0, 8, 3):
    alone = choose_token(logits_BV[b : b + 1], 1, number[b : b + 1], position[b : b + 1])
    assert alone[0] == together[b]
  same = np.zeros((64, V), np.float32)
  zeros, count = np.zeros(64, int), np.arange(64)
  for other in (
    choose_token(same, 1, zeros, count),
    choose_token(same, 1, count, zeros),
    choose_token(same, 2, zeros, count),
  ):
    assert len(set(np.asarray(other).tolist())) > 3
  seeds = [np.asarray(choose_token(same, seed, zeros, count)) for seed in (1, 2)]
  assert (seeds[0] != seeds[1]).any()
