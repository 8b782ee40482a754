"""The benchmark of decoding runs at nano sizes on a CPU; nothing here is timed."""

import json

import jax
import numpy as np
import pytest

from configs import nano
from configs.schema import Settings
from deepseek_jax.sampling.sampler import Sampler
from tests.bench import decode
from tests.bench.__main__ import main

NANO = Settings.from_dict(nano.get_config().to_dict())


@pytest.mark.slow
def test_a_filled_cache_is_one_that_prefill_could_have_left():
  sampler = Sampler(NANO.model, None, None)
  cache = decode.filled(sampler, rows=2, tokens=20, room=12)
  empty = jax.eval_shape(lambda: sampler.new_cache(2, 32))
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(cache) == shapes(empty)
  assert cache.position.tolist() == [20, 20]
  stored = [memory.entries for memory in cache.layers if memory.entries is not None]
  assert all(len(np.unique(codes)) > 100 for codes, _ in stored)


@pytest.mark.slow
def test_prefill_and_steps_of_every_length_are_recorded(tmp_path, capsys):
  path = tmp_path / "decode.json"
  lengths = ["--prompts", "40", "--contexts", "64,32", "--steps", "2", "--rows", "2"]
  assert main(["decode", "--config", "configs/nano.py", *lengths, "--json", str(path)]) == 0
  document = json.loads(path.read_text())
  assert [record["context"] for record in document["decode"]] == [32, 64]
  assert document["early_exit_over_exact"]["40"] > 0
  assert min(document["growth"].values()) > 0 and document["device"] == "cpu"
  assert main(["decode", "--contxts=3"]) == 2
  assert "--contxts is not an argument" in capsys.readouterr().out
