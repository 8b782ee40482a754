"""The benchmark of replay at nano sizes on a CPU: equal work on both sides, which is not timed."""

import json
import os
import subprocess
import sys

import pytest

from configs import nano
from configs.schema import Settings
from tests.bench import replay
from tests.bench.__main__ import main

NANO = Settings.from_dict(nano.get_config().to_dict())  # 64 slots, window 8


def test_both_sides_have_the_same_tokens_and_learn_the_same_ones():
  settings = replay.with_replay(NANO, 2)
  whole, replayed = (replay.batch(settings, 2, 0, replayed=r) for r in (False, True))
  assert whole.tokens.shape == (4, 64) and replayed.tokens.shape == (4, 64 + 2 * 8)
  assert (replayed.is_copy).sum() == 4 * 2 * 8, "every turn is a hit"
  assert ((replayed.document >= 0) & ~replayed.is_copy).sum() == (whole.document >= 0).sum()
  for b in range(4):
    learned = [layout.targets[b][layout.weights[b] > 0].tolist() for layout in (whole, replayed)]
    assert learned[0] == learned[1] and len(learned[0]) == 2 * 3


@pytest.mark.slow
def test_both_runs_and_the_formula_are_recorded(tmp_path):
  path = tmp_path / "replay.json"
  words = ["--config", "configs/nano.py", "--responses", "2", "--steps", "1", "--json", str(path)]
  subprocess.run(
    [sys.executable, "-m", "tests.bench", "replay", *words],
    env=os.environ | {"XLA_FLAGS": ""},  # one device, unlike this process
    check=True,
  )
  document = json.loads(path.read_text())
  runs = document["runs"]
  assert runs["replayed"]["decoder_slots"] == 2 * (8 + 3) and runs["whole"]["decoder_slots"] == 64
  assert runs["whole"]["metrics"]["loss_tokens"] == runs["replayed"]["metrics"]["loss_tokens"]
  assert runs["whole"]["metrics"]["tokens"] == runs["replayed"]["metrics"]["tokens"]
  assert document["speedup"] > 0 and document["by_formula"]["flops"] > 1


def test_what_cannot_run_is_said_before_anything_is_compiled(capsys):
  assert main(["replay", "--config", "configs/nano.py", "--config.model.attention.window=7"]) == 2
  assert "model.attention.window is 7" in capsys.readouterr().out
