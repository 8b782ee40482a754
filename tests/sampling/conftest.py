"""The small model's programs, compiled once for all tests of a process."""

import jax
import numpy as np
import pytest

from deepseek_jax.model import Model, logits
from deepseek_jax.sampling.sampler import Sampler
from tests.sampling.small_model import CFG, HASHING, Small, random_variables


@pytest.fixture(scope="session")
def small():
  variables = random_variables(CFG)
  run = jax.jit(lambda variables, layout: logits(Model(CFG).apply(variables, layout)))
  sampler = Sampler(CFG, variables, HASHING, packed=False, chunk=8)
  return Small(variables, lambda layout: np.asarray(run(variables, layout)), sampler)
