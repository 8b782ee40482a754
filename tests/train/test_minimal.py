"""The loop to be read takes the same step as the one that runs."""

import itertools
import pathlib

import jax
import numpy as np
import pytest

from deepseek_jax.sharding import make_mesh
from deepseek_jax.step import init_state
from train import minimal
from train.programs import build_programs

FILE = pathlib.Path(minimal.__file__)
STEPS = 3


@pytest.fixture(scope="module")
def settings(runs):
  return runs.command("unused").settings


def test_it_is_short():
  assert len(FILE.read_text().splitlines()) < 100


@pytest.mark.slow
def test_its_steps_are_those_of_the_loop_that_runs(settings, one_device):
  mesh = make_mesh(settings.mesh, one_device)
  data = list(itertools.islice(minimal.batches(settings, FILE.read_bytes()), STEPS))
  step, optimizer = minimal.make_step(settings)
  params, balance = minimal.init(settings, data[0])
  with jax.set_mesh(mesh):
    programs = build_programs(settings, mesh)
    shardings = jax.tree.map(lambda shape: shape.sharding, programs.abstract_state)
    # Copies: the step that runs consumes its state.
    state = jax.device_put(
      jax.tree.map(np.array, init_state(params, balance, optimizer)), shardings
    )
    jax.tree.map(np.testing.assert_array_equal, programs.create().params, state.params)
    opt_state, losses, wanted = optimizer.init(params), [], []
    for batch in data:
      params, balance, opt_state, loss = step(params, balance, opt_state, batch)
      state, metrics = programs.step(state, batch)
      losses.append(float(loss))
      wanted.append(float(metrics["loss"]))
  np.testing.assert_allclose(losses, wanted, rtol=1e-4)
  assert losses[-1] < losses[0]
  close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2)
  jax.tree.map(close, params, state.params)
  jax.tree.map(np.testing.assert_array_equal, balance, state.balance)
