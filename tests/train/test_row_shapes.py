"""Exact and replayed steps take turns on one state, and neither is compiled while they run."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import nano
from configs.schema import Settings
from data.replay import is_replayed
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
from tests.bench import replay
from train.programs import build_programs
from train.row_shapes import abstract_batches, compile_step

NANO = Settings.from_dict(nano.get_config().to_dict())


def settings_of(share: float) -> Settings:
  settings = replay.with_replay(dataclasses.replace(NANO, mesh=MeshConfig(fsdp=8)), 2)
  data = settings.data
  data = dataclasses.replace(
    data, batch_rows=8, replay=dataclasses.replace(data.replay, share=share)
  )
  return dataclasses.replace(settings, data=data)


@pytest.mark.parametrize(("share", "shapes"), [(0, [64]), (0.5, [64, 80]), (1, [80])])
def test_only_shapes_that_occur_are_compiled(share, shapes):
  settings = settings_of(share)
  batches = abstract_batches(settings, make_mesh(settings.mesh))
  assert [batch.tokens.shape for batch in batches] == [(8, slots) for slots in shapes]


@pytest.mark.slow
def test_steps_of_both_kinds_go_on_from_each_other():
  settings = settings_of(0.5)
  mesh = make_mesh(settings.mesh)
  with jax.set_mesh(mesh):
    programs = build_programs(settings, mesh)
    shapes = abstract_batches(settings, mesh)
    step, state = compile_step(programs, shapes), programs.create()
    losses = []
    for number in range(8):
      replayed = is_replayed(number, settings.data.replay.share)
      batch = replay.batch(settings, 2, 0, replayed=replayed)
      shardings = jax.tree.map(lambda x: x.sharding, shapes[replayed])
      state, metrics = step(state, jax.device_put(batch, shardings))
      assert metrics["tokens"] == 8 * 64 and metrics["loss_tokens"] == 8 * 2 * 3
      losses.append(float(metrics["loss"]))
  assert int(state.step) == 8 and np.all(np.isfinite(losses))
  assert losses[6] < losses[0] and losses[7] < losses[1], "both kinds learn"
