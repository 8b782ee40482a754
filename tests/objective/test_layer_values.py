"""Repeated groups come apart into the layers that they are made of."""

import jax.numpy as jnp
import numpy as np

from deepseek_jax.objective.layer_values import by_layer
from deepseek_jax.types import LayerAux


def test_groups_of_two_layers_interleave():
  tree = {
    "layer_10": jnp.array(10.0),
    "layers_2_7": {"layer_0": jnp.array([2.0, 4.0, 6.0]), "layer_1": jnp.array([3.0, 5.0, 7.0])},
    "layer_0": jnp.array(0.0),
  }
  got = by_layer(tree)
  assert list(got) == [0, 2, 3, 4, 5, 6, 7, 10]
  assert all(value == layer for layer, value in got.items())


def test_tuples_of_arrays_come_apart_together():
  ones = np.ones(2)
  stacked = LayerAux(np.arange(6.0).reshape(2, 3), np.zeros((2, 3)), ones, np.arange(2.0), ones)
  got = by_layer({"layers_4_5": {"layer_0": stacked}})
  assert got[5].indexer_kl == 1.0
  np.testing.assert_array_equal(got[5].load_text_E, [3, 4, 5])
