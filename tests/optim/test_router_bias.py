"""Router biases move against the load of their own modality and stay centred."""

import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.optim import router_bias
from deepseek_jax.types import LayerAux


def aux(text, vision):
  zero = jnp.zeros(np.shape(text)[:-1])
  loads = jnp.asarray(text, jnp.float32), jnp.asarray(vision, jnp.float32)
  return LayerAux(*loads, balance=zero, indexer_kl=zero, rounds=zero)


def biases(*shape, value=0.0):
  return {"moe": {"bias": jnp.full(shape, value), "bias_vl": jnp.full(shape, value)}}


def test_overloaded_experts_go_down_and_idle_ones_up():
  layers = {"layer_0": aux([9, 0, 3, 0], [0, 5, 5, 2])}
  got = router_bias.update({"layer_0": biases(4)}, layers, 0.001)["layer_0"]["moe"]
  np.testing.assert_allclose(got["bias"], [-0.001, 0.001, 0.0, 0.001] - np.float32(0.00025))
  np.testing.assert_allclose(got["bias_vl"], [0.001, -0.001, -0.001, 0.001])


def test_mean_stays_zero_over_many_lopsided_steps():
  balance, layers = {"layer_0": biases(4)}, {"layer_0": aux([9, 0, 0, 0], [0, 0, 0, 0])}
  for _ in range(200):
    balance = router_bias.update(balance, layers, 0.001)
  assert abs(balance["layer_0"]["moe"]["bias"].mean()) < 1e-7
  assert balance["layer_0"]["moe"]["bias"][0] < -0.2


def test_a_modality_without_tokens_keeps_its_bias_bit_for_bit():
  before = {"layer_0": biases(4, value=0.1)}  # not centred: centring would show
  after = router_bias.update(before, {"layer_0": aux([1, 2, 3, 4], [0, 0, 0, 0])}, 0.001)
  np.testing.assert_array_equal(
    after["layer_0"]["moe"]["bias_vl"], before["layer_0"]["moe"]["bias_vl"]
  )
  assert abs(after["layer_0"]["moe"]["bias"].mean()) < 1e-7


def test_speed_0_leaves_biases_as_they_are_bit_for_bit():
  before = {"layer_0": biases(4, value=0.1)}
  after = router_bias.update(before, {"layer_0": aux([1, 2, 3, 4], [4, 0, 0, 0])}, 0.0)
  for name, bias in after["layer_0"]["moe"].items():
    np.testing.assert_array_equal(bias, before["layer_0"]["moe"][name])


def test_layers_of_a_repeated_group_are_balanced_one_by_one():
  layers = {"layers_2_5": {"layer_0": aux([[4, 0], [0, 4]], [[0, 0], [0, 0]])}}
  got = router_bias.update({"layers_2_5": {"layer_0": biases(2, 2)}}, layers, 0.001)
  moe = got["layers_2_5"]["layer_0"]["moe"]
  np.testing.assert_allclose(moe["bias"], [[-0.001, 0.001], [0.001, -0.001]])
  np.testing.assert_array_equal(moe["bias_vl"], np.zeros((2, 2)))


def test_equal_loads_move_nothing_and_dtype_stays_float32():
  layers = {"layer_0": aux([7, 7, 7], [1, 1, 1])}
  moe = router_bias.update({"layer_0": biases(3)}, layers, 0.001)["layer_0"]["moe"]
  for bias in moe.values():
    np.testing.assert_array_equal(bias, np.zeros(3))
    assert bias.dtype == jnp.float32


@pytest.mark.parametrize(("text", "wanted"), [([6, 0, 0], 3.0), ([2, 2, 2], 1.0), ([0, 0, 0], 0.0)])
def test_imbalance_is_that_of_the_worst_layer(text, wanted):
  layers = {
    "layer_0": aux([0, 0, 0], [0, 0, 0]),
    "layers_1_2": {"layer_0": aux([text, text], np.zeros((2, 3)))},
  }
  assert router_bias.imbalance(layers) == wanted


def test_every_layer_tells_its_imbalance():
  layers = {
    "layer_0": aux([1, 1, 4], [9, 0, 0]),
    "layers_1_2": {"layer_0": aux([[6, 0, 0], [2, 2, 2]], np.zeros((2, 3)))},
  }
  balance = {"layer_0": biases(3), "layers_1_2": {"layer_0": biases(2, 3)}}
  condition = router_bias.condition(balance, layers)
  assert [condition[f"router_imbalance_layer_{n}"] for n in range(3)] == [2.0, 3.0, 1.0]
