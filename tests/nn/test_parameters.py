"""The table of initial values, role by role, on a model that has every role."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model
from deepseek_jax.nn import parameters

# Roles by the last name of the path; every other name belongs to a matrix, embedding or table.
ONES = {"norm", "q_norm", "kv_norm", "k_norm", "attn_norm", "ffn_norm", "q_weight", "k_weight"}
ZEROS = {"sink", "bias", "bias_vl"}
MATRICES = {
  "embed", "head", "table", "wkv", "wq_a", "wq_b", "wo_a", "wo_b", "wk", "wgate", "weights_proj",
  "fn", "gate", "w1", "w2", "w3",
}  # fmt: skip


@pytest.fixture(scope="module")
def cfg():
  """Two layers: one of ratio 2, one of ratio 1 with Engram; both have entries and an indexer."""
  small = ModelConfig.from_dict(nano.get_config().model.to_dict())
  return dataclasses.replace(
    small,
    compress_ratios=(2, 1),
    kv_sources=(0, 1),
    index_sources=(0, 1),
    decoder_start=1,
    streams=3,
    indexer=dataclasses.replace(small.indexer, pool_source=1),
    engram=dataclasses.replace(small.engram, layers=(1,), table_rows=small.engram.table_rows[:1]),
    init_std=0.03,
  )


@pytest.fixture(scope="module")
def leaves(cfg):
  """Path parts -> initial value."""
  layout = build_layout([Document(np.arange(4))], slots=4, ratios=cfg.ratios)
  shape = (1, 4, len(cfg.engram.layers), cfg.engram.lookups)
  layout = layout._replace(engram_rows=np.zeros(shape, np.int32))
  init = jax.jit(Model(cfg).init, compiler_options={"xla_backend_optimization_level": 0})
  variables = nn.unbox(init(jax.random.key(0, impl="rbg"), layout))
  paths = jax.tree_util.tree_leaves_with_path(variables)
  return {tuple(key.key for key in path): np.asarray(leaf) for path, leaf in paths}


def test_every_parameter_has_a_role_and_float32(leaves):
  names = {path[-1] for path in leaves}
  assert names == ONES | ZEROS | MATRICES | {"base", "scale"}
  assert all(leaf.dtype == np.float32 for leaf in leaves.values())


def test_gains_start_at_one_and_sinks_and_biases_at_zero(leaves):
  for path, leaf in leaves.items():
    if path[-1] in ONES:
      assert np.all(leaf == 1), path
    if path[-1] in ZEROS:
      assert np.all(leaf == 0), path


def test_matrices_embeddings_and_tables_are_normal_with_the_configured_deviation(leaves, cfg):
  scores = []
  for path, leaf in leaves.items():
    if path[-1] in MATRICES:
      leaf = leaf[: cfg.engram.table_rows[0]] if path[-1] == "table" else leaf
      deviation = leaf.std() / cfg.init_std
      assert deviation == pytest.approx(1, abs=5 / np.sqrt(2 * leaf.size)), path
      assert abs(leaf.mean()) < 5 * cfg.init_std / np.sqrt(leaf.size), path
      scores.append(leaf.ravel() / cfg.init_std)
  scores = np.concatenate(scores)
  assert np.mean(scores**4) == pytest.approx(3, rel=0.05)  # of a normal, and of no uniform


def test_rows_after_a_table_s_own_start_at_zero_and_change_none_of_them(leaves, cfg):
  [table] = [leaf for path, leaf in leaves.items() if path[-1] == "table"]
  rows = cfg.engram.table_rows[0]
  assert len(table) == cfg.engram.stored_rows[0] > rows and not table[rows:].any()
  key, real = jax.random.key(1), (rows, cfg.engram.head_dim)  # JAX's default kind of key
  drawn = parameters.normal_rows(cfg.init_std, rows)(key, table.shape)
  np.testing.assert_array_equal(drawn[:rows], parameters.normal(cfg.init_std)(key, real))


def test_no_two_matrices_start_equal(leaves):
  matrices = [leaf for path, leaf in leaves.items() if path[-1] in MATRICES]
  first = [tuple(leaf.ravel()[:4]) for leaf in matrices]
  assert len(set(first)) == len(matrices)


def test_hyper_connections_start_near_one_stream_per_site(leaves, cfg):
  c = cfg.streams
  for path, leaf in leaves.items():
    if path[-1] == "scale":
      np.testing.assert_array_equal(leaf, np.float32([0.01] * 3))
    if path[-1] == "base":
      layer = int(path[1].removeprefix("layer_"))
      site = 2 * layer + (path[2] == "hc_ffn")
      pre = np.where(np.arange(c) == site % c, 4, -4)
      np.testing.assert_array_equal(leaf, [*pre, *np.zeros(c), *(4 * np.eye(c)).ravel()])


def test_router_biases_are_kept_out_of_the_parameters(leaves):
  for path in leaves:
    assert (path[0] == "balance") == (path[-1] in {"bias", "bias_vl"}), path
