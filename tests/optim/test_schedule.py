"""Warm-up, plateau, cosine and floor, by the tokens of updates that grow from stage to stage."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest

from deepseek_jax.optim.schedule import Span, learning_rate, tokens_after, total_tokens
from deepseek_jax.training_config import OptimConfig

CFG = OptimConfig(peak_lr=1.0, final_lr=0.1, warmup_steps=10, decay_begin=None, decay_end=None)
HUNDRED = [Span(100, 7)]
BATCH = 2**16 * 1536  # 100.6 M tokens (report 4.2)
REPORT = [Span(447_000, BATCH)]  # 45 T


@pytest.mark.parametrize(
  ("update", "rate"),
  [
    (0, 0.1),
    (4, 0.5),
    (9, 1.0),
    (54, 0.55),
    (31, 0.1 + 0.9 * (1 + math.cos(math.pi * 22 / 90)) / 2),
    (99, 0.1),
    (500, 0.1),
  ],
)
def test_without_token_counts_the_cosine_spans_the_run(update, rate):
  np.testing.assert_allclose(learning_rate(CFG, HUNDRED)(update), rate, rtol=1e-5)


@pytest.mark.parametrize(
  ("trillions", "rate"),
  [
    (1, 2.6e-4),
    (27.9, 2.6e-4),
    (31, 2.6e-5 + 2.34e-4 * (1 + math.cos(math.pi / 4)) / 2),
    (34, 1.43e-4),
    (40, 2.6e-5),
    (44.9, 2.6e-5),
  ],
)
def test_the_defaults_are_the_reports(trillions, rate):
  update = round(trillions * 1e12 / BATCH) - 1
  np.testing.assert_allclose(learning_rate(OptimConfig(), REPORT)(update), rate, rtol=1e-4)
  assert learning_rate(OptimConfig(), REPORT)(999) == pytest.approx(1.3e-4)


def test_larger_batches_bring_the_same_rate_at_the_same_tokens():
  cfg = dataclasses.replace(CFG, decay_begin=400, decay_end=800)
  small, grown = [Span(1000, 1)], [Span(300, 1), Span(175, 4)]
  updates, tokens = np.arange(10, 475), tokens_after(grown)(np.arange(11, 476))
  got = learning_rate(cfg, grown)(updates)
  np.testing.assert_allclose(got, learning_rate(cfg, small)(tokens - 1), rtol=1e-6)
  assert tokens[-1] == total_tokens(grown) == 1000 and total_tokens(grown, 310) == 340


def test_rate_never_rises_after_the_warm_up():
  rates = np.array(learning_rate(CFG, HUNDRED)(np.arange(9, 120)))
  assert (np.diff(rates) <= 0).all()


def test_powers_of_two_tokens_give_the_very_rates_of_a_schedule_by_steps():
  cfg = dataclasses.replace(CFG, peak_lr=2e-2, final_lr=1e-3, warmup_steps=50)
  by_steps = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 50, 300, 1e-3)
  by_tokens = learning_rate(cfg, [Span(300, 1024)])
  updates = np.arange(300)
  got, want = (jax.jit(jax.vmap(f))(updates) for f in (by_tokens, lambda n: by_steps(n + 1)))
  np.testing.assert_array_equal(got, want)


def test_no_warm_up_starts_near_the_peak():
  cfg = dataclasses.replace(CFG, final_lr=0.0, warmup_steps=0)
  np.testing.assert_allclose(learning_rate(cfg, [Span(1000, 3)])(0), 1.0, rtol=1e-4)


def test_warm_up_that_takes_the_whole_run_is_refused_in_one_sentence():
  with pytest.raises(ValueError, match="warmup_steps is 10; .* below total_steps, which is 10"):
    learning_rate(CFG, [Span(10, 1)])


def test_a_cosine_before_the_end_of_the_warm_up_is_refused_in_one_sentence():
  cfg = dataclasses.replace(CFG, decay_begin=69)
  with pytest.raises(ValueError, match=r"decay_begin \(69\) must lie between .*70 tokens.*700"):
    learning_rate(cfg, HUNDRED)
