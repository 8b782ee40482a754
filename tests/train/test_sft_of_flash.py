"""Fine-tuning of the release's sizes by shapes alone: its steps trace, and its state fits."""

import dataclasses
import math

import jax
import pytest

from configs import sft
from configs.schema import Settings
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import LowRankConfig, MeshConfig
from train.programs import build_programs
from train.row_shapes import abstract_batches

FLASH = Settings.from_dict(sft.get_config().to_dict())
CHIPS, MEMORY = 512, 95e9  # of v5p; bytes of each
ON_ONE = dataclasses.replace(FLASH, mesh=MeshConfig())


def with_factors(rank):
  """With experts in FP4 as well."""
  numerics = dataclasses.replace(FLASH.model.numerics, experts_fp4=True)
  return dataclasses.replace(
    ON_ONE,
    optim=dataclasses.replace(FLASH.optim, low_rank=LowRankConfig(rank=rank)),
    model=dataclasses.replace(FLASH.model, numerics=numerics),
  )


@pytest.fixture(scope="module")
def mesh():
  with jax.set_mesh(mesh := make_mesh(MeshConfig(), jax.devices()[:1])):
    yield mesh


def size(tree):
  return sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_both_kinds_of_steps_trace_with_factors(mesh):
  settings = with_factors(16)
  state, step = (programs := build_programs(settings, mesh)).abstract_state, programs.step
  batches = abstract_batches(settings, mesh)
  shapes = [(b.tokens.shape[1], b.decoder_slots.shape[1]) for b in batches]
  assert shapes == [(65536, 65536), (65536 + 8 * 128, 16384)]
  for batch in batches:
    after, metrics = jax.eval_shape(step, state, batch)
    same = lambda was, now: was.shape == now.shape and was.dtype == now.dtype
    assert jax.tree.all(jax.tree.map(same, state, after))
    assert metrics["loss"].shape == ()


@pytest.mark.slow
def test_the_state_fits(mesh):
  """Beside parameters and moments there are gradients, of a piece and added up; with factors what
  the model sees and its gradient.
  """
  assert math.prod(dataclasses.astuple(FLASH.mesh)) == CHIPS
  for settings in (ON_ONE, with_factors(16)):
    state = build_programs(settings, mesh).abstract_state
    factors, params, moments = map(size, (state.params.get("low_rank"), *state[1:4:2]))
    needed = params + moments + 2 * (params - factors)
    print(f"{factors:,} of {params:,} in factors, {moments:,} in moments, {needed:,} in all")
    assert needed < 0.3 * MEMORY * CHIPS
    if factors:
      assert factors < 0.01 * params and moments == pytest.approx(2 * factors, rel=1e-6)
