"""The released sizes, counted on shapes alone."""

import math

import jax
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.config import flash
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model


def shapes(cfg):
  """Path -> shape of every variable; nothing is allocated."""
  layout = build_layout([Document(np.arange(2))], slots=2, ratios=cfg.ratios)
  rows = (1, 2, len(cfg.engram.layers), cfg.engram.lookups)
  layout = layout._replace(engram_rows=np.zeros(rows, np.int32))
  init = lambda key: nn.unbox(Model(cfg).init(key, layout))
  leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.random.key(0)))
  return {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}


def count(shapes_of, chosen=lambda path: True):
  return sum(math.prod(shape) for path, shape in shapes_of.items() if chosen(path))


@pytest.fixture(scope="module")
def released():
  before = {id(array) for array in jax.live_arrays()}
  counted = shapes(flash())
  new = [array for array in jax.live_arrays() if id(array) not in before]
  assert sum(array.nbytes for array in new) < 2**20, "counting allocates no parameter"
  return counted


def is_table(path):
  return path[-1] == "table"


def test_the_released_sizes_have_the_published_parameter_counts(released):
  # model.md section 1.6, without the vision tower's 485,268,480. The zero rows that tables end
  # with, so that devices can share them, are not parameters.
  tables, engram = count(released, is_table), flash().engram
  stored = sum(engram.stored_rows) * engram.head_dim
  assert tables == stored and 0 < stored - 196_613_849_600 < 2 * 1024 * engram.head_dim
  assert sum(engram.table_rows) * engram.head_dim == 196_613_849_600
  assert count(released) - tables == 551_880_835_184
  assert count(released) - tables + 196_613_849_600 == 748_494_684_784


def test_router_biases_are_a_collection_of_their_own(released):
  balance = {path for path in released if path[0] == "balance"}
  assert count(released, lambda path: path in balance) == 30_720 == 2 * 40 * 384
  assert {path[-1] for path in balance} == {"bias", "bias_vl"}


def test_equal_groups_of_the_release_are_stacked(released):
  groups = {path[1] for path in released if path[1].startswith("layers_")}
  assert groups == {"layers_2_13", "layers_24_39"}
  assert released["params", "layers_24_39", "layer_0", "attn", "indexer", "wq_b"][0] == 4
  assert released["params", "layers_2_13", "layer_5", "moe", "experts", "w1"][:2] == (2, 384)
