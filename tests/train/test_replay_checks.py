"""Combinations of replay, model and mesh that cannot run are named before anything starts."""

import dataclasses

import pytest

from configs import nano
from configs.schema import Settings
from data.config import ReplayConfig
from deepseek_jax.training_config import MeshConfig
from train import checks
from train.replay_checks import replay_problems

SETTINGS = Settings.from_dict(nano.get_config().to_dict())  # window 8, a pool of blocks of 2


def with_replay(settings=SETTINGS, **changes) -> Settings:
  sound = {"share": 0.5, "decoder_slots": 32, "hit_multiple": 4, "max_hits": 2}
  data = dataclasses.replace(settings.data, replay=ReplayConfig(**sound | changes))
  return dataclasses.replace(settings, data=data)


def on_context(context: int) -> Settings:
  return dataclasses.replace(SETTINGS, mesh=MeshConfig(context=context))


def test_sound_settings_have_no_problem_and_all_checks_ask():
  assert list(replay_problems(with_replay())) == []
  found = checks.problems(with_replay(hit_multiple=3), devices=1, reads_data=False)
  assert sum("hit_multiple" in problem for problem in found) == 2


@pytest.mark.parametrize(
  ("settings", "part"),
  [
    (with_replay(hit_multiple=1), "multiple of the 2 tokens of a block"),
    (with_replay(hit_multiple=6), "model.attention.window is 8; it must be a multiple of"),
    (with_replay(on_context(4), decoder_slots=30), "data.replay.decoder_slots is 30; mesh.context"),
    (with_replay(on_context(8), decoder_slots=32), "at least model.attention.window - 1 (7)"),
    (with_replay(on_context(8), decoder_slots=64, max_hits=1), "is 72, which must be a multiple"),
    (
      with_replay(
        dataclasses.replace(SETTINGS, model=dataclasses.replace(SETTINGS.model, decoder_start=None))
      ),
      "model.decoder_start is none: there is no decoder",
    ),
  ],
)
def test_what_cannot_run_is_one_sentence(settings, part):
  (problem,) = replay_problems(settings)
  assert part in problem


def test_without_replay_nothing_is_asked():
  assert list(replay_problems(with_replay(share=0.0, hit_multiple=3))) == []
