"""The benchmark of the optimizer at nano sizes on a CPU: what it works on, which is not timed."""

import json

from deepseek_jax.flops import parameters
from tests.bench.__main__ import main
from train.settings import load


def test_an_update_moves_every_weight_with_two_moments_each(tmp_path):
  path = tmp_path / "optimizer.json"
  assert (
    main(["optimizer", "--config", "configs/nano.py", "--steps", "1", "--json", str(path)]) == 0
  )
  document = json.loads(path.read_text())
  assert document["parameters"] == parameters(load("configs/nano.py", {}).model)["total"]
  assert 0 <= document["state_bytes"] - 3 * 4 * document["parameters"] < 100, "and counters"
  assert document["seconds"] > 0


def test_a_wrong_word_is_told_before_anything_is_compiled(capsys):
  assert main(["optimizer", "--config", "configs/nano.py", "--stepz", "1"]) == 2
  assert "--stepz" in capsys.readouterr().err
