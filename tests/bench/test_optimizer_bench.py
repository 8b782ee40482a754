"""The benchmark of the optimizer at nano sizes on a CPU: what it works on, which is not timed."""

import json

from deepseek_jax.flops import parameters
from tests.bench.__main__ import main
from train.settings import load


def test_an_update_moves_every_weight_with_two_moments_each(tmp_path):
  path = tmp_path / "optimizer.json"
  words = ["--config", "configs/nano.py", "--steps", "1", "--json", str(path)]
  assert main(["optimizer", *words]) == 0
  document = json.loads(path.read_text())
  counted = parameters(load("configs/nano.py", {}).model)["total"]
  assert counted <= document["parameters"] < 1.1 * counted, "tables are filled up"
  assert 0 <= document["state_bytes"] - 3 * 4 * document["parameters"] < 100, "and counters"
  assert document["seconds"] > 0


def test_what_is_wrong_is_told_before_anything_is_compiled(capsys):
  for words in (["--stepz", "1"], ["--steps", "0"], ["--config.optim.matrix", "muon"]):
    assert main(["optimizer", "--config", "configs/nano.py", *words]) == 2
    assert words[0].removeprefix("--config.") in capsys.readouterr().out
