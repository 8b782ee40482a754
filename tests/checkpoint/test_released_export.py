"""Weights of any value go out rounded once, and the errors that are told are the real ones."""

import json
import pathlib

import numpy as np
import pytest
import tensorstore as ts

from deepseek_jax.checkpoint import CheckpointError
from deepseek_jax.checkpoint.names import named_leaves
from deepseek_jax.checkpoint.released import COLLECTIONS, load_released
from deepseek_jax.checkpoint.released_config import released_config
from deepseek_jax.checkpoint.released_export import (
  kind,
  owners_of_tensors,
  write_index,
  write_shard,
)
from deepseek_jax.checkpoint.released_folder import open_released
from deepseek_jax.checkpoint.released_index import release_tensors, shard_plan
from deepseek_jax.checkpoint.released_names import parameters

CASE = pathlib.Path(__file__).resolve().parents[1] / "reference" / "quantized_model"
CFG = released_config(json.loads((CASE / "config.json").read_text()))
OWNERS = owners_of_tensors(CFG)


def drawn():
  """Random weights of every size of step, as our leaves."""
  random = np.random.default_rng(0)
  values = {item: {} for item in COLLECTIONS}
  for parameter in parameters(CFG):
    array = random.normal(size=parameter.shape) * np.exp2(random.integers(-12, 3, parameter.shape))
    if parameter.rows:
      array[parameter.tensors[0].view[0] :] = 0
    values[parameter.item][parameter.path] = array.astype(np.float32)
  return values


def export(values, folder, dtype="released"):
  arrays = {item: {n: ts.array(x) for n, x in leaves.items()} for item, leaves in values.items()}
  (shard,) = shards = shard_plan(release_tensors(CFG), dtype)
  folder.mkdir()
  write_index(folder, shards, CFG, dtype)
  return write_shard(arrays, OWNERS, shard, folder, dtype)


def read(folder):
  tree = load_released(open_released(folder).tensors, CFG)
  return {item: named_leaves(tree[collection]) for item, collection in COLLECTIONS.items()}


@pytest.mark.parametrize("dtype", ["released", "bfloat16"])
def test_errors_are_those_between_what_went_out_and_what_comes_in(dtype, tmp_path):
  values = drawn()
  told = export(values, tmp_path / "out", dtype)
  found = read(tmp_path / "out")
  of_errors, squares = dict.fromkeys(told, 0.0), dict.fromkeys(told, 0.0)
  for parameter in parameters(CFG):
    before, after = (x[parameter.item][parameter.path] for x in (values, found))
    name = kind(parameter.tensors[0].name)
    of_errors[name] += np.sum(np.square(np.float64(after) - before))
    squares[name] += np.sum(np.square(np.float64(before)))
  for name, rounding in told.items():
    assert rounding.rms == pytest.approx(np.sqrt(of_errors[name] / squares[name]), rel=1e-4), name
  plain, fp8, fp4 = (told[n] for n in ("head.weight", "attn.wkv.weight", "ffn.experts.w1.weight"))
  assert told["hc_attn_fn"].largest == 0 < plain.largest <= 2**-8
  if dtype == "bfloat16":
    assert fp8.largest <= 2**-8 and fp4.largest <= 2**-8
  else:
    # Half a step at the top, over the smallest maximum that has such steps: 16 / 240 and 1 / 5.
    assert 2**-8 < fp8.largest <= 1 / 15 < fp4.largest <= 1 / 5


def test_what_came_in_goes_out_with_the_same_values_and_then_with_the_same_bytes(tmp_path):
  """A block whose largest value was rounded down may take a smaller scale once."""
  export(drawn(), tmp_path / "first")
  once = read(tmp_path / "first")
  told = export(once, tmp_path / "second")
  assert all(rounding.largest == 0 for rounding in told.values())
  twice = read(tmp_path / "second")
  for item, leaves in once.items():
    for name, values in leaves.items():
      np.testing.assert_array_equal(twice[item][name], values, name)
  export(twice, tmp_path / "third")
  second, third = (
    {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    for name in ("second", "third")
  )
  assert second == third


def test_a_weight_that_is_not_finite_is_named(tmp_path):
  values = drawn()
  values["params"]["layer_3/moe/experts/w2"][1, 5, 6] = np.inf
  with pytest.raises(CheckpointError, match="^layer_3/moe/experts/w2 holds values that are not"):
    export(values, tmp_path / "out")
