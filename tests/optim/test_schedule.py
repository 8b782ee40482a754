"""Warm-up, cosine and what happens at their ends."""

import math

import numpy as np
import pytest

from deepseek_jax.optim.schedule import learning_rate
from deepseek_jax.training_config import OptimConfig

CFG = OptimConfig(peak_lr=1.0, final_lr=0.1, warmup_steps=10)


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
def test_rate_at(update, rate):
  np.testing.assert_allclose(learning_rate(CFG, 100)(update), rate, rtol=1e-5)


def test_rate_never_rises_after_the_warm_up():
  rates = np.array(learning_rate(CFG, 100)(np.arange(9, 120)))
  assert (np.diff(rates) <= 0).all()


def test_no_warm_up_starts_near_the_peak():
  rate = learning_rate(OptimConfig(peak_lr=1.0, final_lr=0.0, warmup_steps=0), 1000)
  np.testing.assert_allclose(rate(0), 1.0, rtol=1e-4)


def test_warm_up_that_takes_the_whole_run_is_refused_in_one_sentence():
  with pytest.raises(ValueError, match="warmup_steps is 10; .* below total_steps, which is 10"):
    learning_rate(CFG, 10)
