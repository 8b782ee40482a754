"""Released tensors become our parameters: layouts, quantized bytes, and every mismatch by name."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.checkpoint.released import (
  dequantize,
  load_released,
  released_config,
  released_parameter,
)
from deepseek_jax.checkpoint.safetensors_file import read_safetensors
from deepseek_jax.config import TABLE_ROWS_MULTIPLE, EngramConfig, flash
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model

CASES = pathlib.Path(__file__).resolve().parents[1] / "reference"
CASE = CASES / "minimal_csa2"
CONFIG = json.loads((CASE / "config.json").read_text())
NO_TABLES = EngramConfig(layers=(), table_rows=())


def shapes(cfg):
  layout = build_layout([Document(np.arange(2))], slots=2, ratios=cfg.ratios)
  rows = np.zeros((1, 2, len(cfg.engram.layers), cfg.engram.lookups), np.int32)
  init = lambda key: nn.unbox(Model(cfg).init(key, layout._replace(engram_rows=rows)))
  return jax.eval_shape(init, jax.random.key(0))


@pytest.fixture(scope="module")
def abstract():
  return shapes(released_config(CONFIG, scan_layers=False))


@pytest.fixture
def tensors():
  return read_safetensors(CASE / "weights.safetensors")


def as_e8m0(code, shape):
  return np.full(shape, code, np.uint8).view(ml_dtypes.float8_e8m0fnu)


def test_bytes_of_the_released_checkpoint_decode_to_the_published_values():
  # model.md section 8
  fp8 = np.uint8([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5] + [0] * 24])
  row = dequantize(fp8.view(ml_dtypes.float8_e4m3fn), as_e8m0(0x73, (1, 1)))[0]
  np.testing.assert_array_equal(
    row[:8],
    [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125],
  )
  fp4 = np.uint8([[0xA0, 0xA8, 0xEC, 0x4A, 0xAD, 0xAF, 0x42, 0xAA] * 2]).view(np.int8)
  row = dequantize(fp4, as_e8m0(0x78, (1, 1)))[0]
  unit = 0.0078125
  wanted = unit * np.float32([0, -1, 0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1])
  np.testing.assert_array_equal(row, [*wanted, *wanted])


def test_a_scale_covers_a_tile_of_32_by_32_and_the_last_tile_may_be_cut():
  ones = np.ones((40, 64), ml_dtypes.float8_e4m3fn)
  scale = np.uint8([[127, 128], [129, 130]]).view(ml_dtypes.float8_e8m0fnu)
  values = dequantize(ones, scale)
  assert values.shape == (40, 64)
  np.testing.assert_array_equal(values[[0, 31, 32, 39]][:, [0, 31, 32, 63]], [
    [1, 1, 2, 2], [1, 1, 2, 2], [4, 4, 8, 8], [4, 4, 8, 8],
  ])  # fmt: skip


def test_matrices_are_turned_and_heads_groups_and_experts_get_axes(abstract, tensors):
  params = load_released(tensors, abstract, NO_TABLES)["params"]
  layer = params["layer_1"]
  same = lambda ours, theirs: np.testing.assert_array_equal(ours, theirs.astype(np.float32))
  heads, width = CONFIG["text_config"]["num_attention_heads"], CONFIG["text_config"]["head_dim"]
  same(params["embed"], tensors["embed.weight"])
  same(layer["attn"]["wq_a"], tensors["layers.1.attn.wq_a.weight"].T)
  wq_b = tensors["layers.1.attn.wq_b.weight"]
  same(layer["attn"]["wq_b"], wq_b.reshape(heads, width, -1).transpose(2, 0, 1))
  groups = CONFIG["text_config"]["o_groups"]
  wo_a = tensors["layers.1.attn.wo_a.weight"]
  same(layer["attn"]["wo_a"], wo_a.reshape(groups, -1, wo_a.shape[1]).transpose(0, 2, 1))
  same(layer["moe"]["experts"]["w1"][2], tensors["layers.1.ffn.experts.2.w1.weight"].T)
  streams = CONFIG["text_config"]["hc_mult"]
  fn = tensors["layers.1.hc_attn_fn"]
  same(layer["hc_attn"]["fn"], fn.reshape(len(fn), streams, -1))


def test_router_biases_go_to_the_balance_collection_alone(abstract, tensors):
  variables = load_released(tensors, abstract, NO_TABLES)
  bias = variables["balance"]["layer_0"]["moe"]["bias"]
  np.testing.assert_array_equal(bias, tensors["layers.0.ffn.gate.bias"])
  assert "bias" not in variables["params"]["layer_0"]["moe"]


def test_a_table_is_followed_by_zero_rows_and_must_have_exactly_its_own():
  folder = CASES / "engram"
  tensors = read_safetensors(folder / "weights.safetensors")
  cfg = released_config(json.loads((folder / "config.json").read_text()), scan_layers=False)
  names = [f"layers.{layer}.engram.embed.weight" for layer in cfg.engram.layers]
  loaded = load_released(tensors, shapes(cfg), cfg.engram)["params"]
  for layer, name, rows in zip(cfg.engram.layers, names, cfg.engram.table_rows, strict=True):
    table = loaded[f"layer_{layer}"]["engram"]["table"]
    scale = tensors[name.removesuffix("weight") + "scale"]
    np.testing.assert_array_equal(table[:rows], dequantize(tensors[name], scale))
    assert len(table) % TABLE_ROWS_MULTIPLE == 0 and not table[rows:].any()
  tensors[names[0]] = tensors[names[0]][:-1]
  with pytest.raises(ValueError, match=rf"^misshapen tensor {names[0]}: [^;]* does not fit [^;]*$"):
    load_released(tensors, shapes(cfg), cfg.engram)


def test_every_problem_is_named_at_once(abstract, tensors):
  del tensors["layers.2.ffn.gate.bias"], tensors["norm.weight"]
  tensors["layers.9.attn_norm.weight"] = np.ones(4, np.float32)
  tensors["head.weight"] = tensors["head.weight"].T
  with pytest.raises(ValueError, match="missing tensor") as error:
    load_released(tensors, abstract, NO_TABLES)
  for problem in (
    "missing tensor layers.2.ffn.gate.bias",
    "missing tensor norm.weight",
    "unused tensor layers.9.attn_norm.weight",
    "misshapen tensor head.weight",
  ):
    assert problem in str(error.value)


def test_tensors_of_parts_that_we_do_not_hold_may_stay_unused(abstract, tensors):
  tensors["mtp.0.norm.weight"] = np.ones(4, np.float32)
  load_released(tensors, abstract, NO_TABLES, ignore=("mtp.",))
  with pytest.raises(ValueError, match=r"^unused tensor mtp.0.norm.weight.$"):
    load_released(tensors, abstract, NO_TABLES)


def test_an_expert_that_is_missing_is_named(abstract, tensors):
  del tensors["layers.1.ffn.experts.2.w3.weight"]
  with pytest.raises(ValueError, match="missing tensor layers.1.ffn.experts.2.w3.weight"):
    load_released(tensors, abstract, NO_TABLES)


def test_every_parameter_of_the_release_has_a_name():
  names = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes(flash(scan_layers=False))):
    names += released_parameter("/".join(k.key for k in path[1:]), leaf.shape).names
  assert len(names) == len(set(names))
  assert "layers.39.ffn.experts.383.w2.weight" in names and "layers.14.engram.embed.weight" in names
  keys = [name for name in names if name.endswith("indexer.wk.weight")]
  assert keys == [f"layers.{n}.attn.indexer.wk.weight" for n in (14, 2, 20, 8)]
  assert sum(name.endswith("indexer.wq_b.weight") for name in names) == 8
  assert sum(name.endswith(("gate.bias", "gate.bias_vl")) for name in names) == 80


def test_released_sizes_give_the_flash_configuration():
  """The keys of a small case with the release's numbers in their place."""
  text = dict(CONFIG["text_config"])
  cfg = released_config(CONFIG)
  assert cfg.dim == text["hidden_size"] and cfg.num_layers == text["num_hidden_layers"]
  assert cfg.decoder_start == 3 and cfg.indexer.pool_source is None
  assert cfg.problems() == []


def test_a_configuration_without_a_key_names_it():
  text = {k: v for k, v in CONFIG["text_config"].items() if k != "index_topk"}
  with pytest.raises(ValueError, match=r"^config.json lacks the key 'index_topk'.$"):
    released_config({"text_config": text})
