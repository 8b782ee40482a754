"""Released tensors become our parameters: layouts, parts, and every mismatch by name."""

import json
import pathlib

import numpy as np
import pytest

from deepseek_jax.checkpoint.released import load_released, read_part
from deepseek_jax.checkpoint.released_config import config_values, released_config
from deepseek_jax.checkpoint.released_formats import decode
from deepseek_jax.checkpoint.released_names import parameters
from deepseek_jax.checkpoint.safetensors_file import (
  DTYPES,
  Header,
  read_headers,
  read_safetensors,
  write_safetensors,
)
from deepseek_jax.config import TABLE_ROWS_MULTIPLE

CASES = pathlib.Path(__file__).resolve().parents[1] / "reference"
CASE = CASES / "minimal_csa2"
CONFIG = json.loads((CASE / "config.json").read_text())
MODEL = released_config(CONFIG, scan_layers=False)
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@pytest.fixture
def tensors():
  return read_safetensors(CASE / "weights.safetensors")


@pytest.fixture
def load(tmp_path):
  """Arrays by name -> our tree, by way of a file."""

  def through_a_file(arrays, cfg=MODEL, **options):
    path = tmp_path / "weights.safetensors"
    entries = {name: Header(NAMES[x.dtype], x.shape) for name, x in arrays.items()}
    write_safetensors(path, entries, arrays.items())
    return load_released(read_headers(path), cfg, **options)

  return through_a_file


def test_matrices_are_turned_and_heads_groups_and_experts_get_axes(load, tensors):
  params = load(tensors)["params"]
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


def test_router_biases_go_to_the_balance_collection_alone(load, tensors):
  variables = load(tensors)
  bias = variables["balance"]["layer_0"]["moe"]["bias"]
  np.testing.assert_array_equal(bias, tensors["layers.0.ffn.gate.bias"])
  assert "bias" not in variables["params"]["layer_0"]["moe"]


def test_a_table_is_followed_by_zero_rows_and_must_have_exactly_its_own(load):
  folder = CASES / "engram"
  tensors = read_safetensors(folder / "weights.safetensors")
  cfg = released_config(json.loads((folder / "config.json").read_text()), scan_layers=False)
  names = [f"layers.{layer}.engram.embed.weight" for layer in cfg.engram.layers]
  loaded = load(tensors, cfg)["params"]
  for layer, name, rows in zip(cfg.engram.layers, names, cfg.engram.table_rows, strict=True):
    table = loaded[f"layer_{layer}"]["engram"]["table"]
    scale = tensors[name.removesuffix("weight") + "scale"]
    np.testing.assert_array_equal(table[:rows], decode(tensors[name], scale))
    assert len(table) % TABLE_ROWS_MULTIPLE == 0 and not table[rows:].any()
  tensors[names[0]] = tensors[names[0]][:-1]
  with pytest.raises(ValueError, match=rf"^misshapen tensor {names[0]}: [^;]* does not fit [^;]*$"):
    load(tensors, cfg)


def test_every_problem_is_named_at_once(load, tensors):
  del tensors["layers.2.ffn.gate.bias"], tensors["norm.weight"]
  tensors["layers.9.attn_norm.weight"] = np.ones(4, np.float32)
  tensors["head.weight"] = tensors["head.weight"].T
  with pytest.raises(ValueError, match="missing tensor") as error:
    load(tensors)
  for problem in (
    "missing tensor layers.2.ffn.gate.bias",
    "missing tensor norm.weight",
    "unused tensor layers.9.attn_norm.weight",
    "misshapen tensor head.weight",
  ):
    assert problem in str(error.value)


def test_tensors_of_parts_that_we_do_not_hold_may_stay_unused(load, tensors):
  tensors["mtp.0.norm.weight"] = np.ones(4, np.float32)
  load(tensors, ignore=("mtp.",))
  with pytest.raises(ValueError, match=r"^unused tensor mtp.0.norm.weight.$"):
    load(tensors)


def test_an_expert_that_is_missing_is_named(load, tensors):
  del tensors["layers.1.ffn.experts.2.w3.weight"]
  with pytest.raises(ValueError, match="missing tensor layers.1.ffn.experts.2.w3.weight"):
    load(tensors)


def test_scanned_groups_stack_the_layers_of_every_repetition(load):
  """nano's layers repeat nowhere, so a case with six equal layers behind the first."""
  cfg = json.loads(json.dumps(CONFIG))
  text = cfg["text_config"]
  text.update(compress_ratios=[0, 1, 1, 1, 1], num_hidden_layers=5)
  text.update(kv_source_layer_ids=[1], index_source_layer_ids=[1, 2, 3, 4])
  scanned = released_config(cfg)
  found = {p.path: p for p in parameters(scanned)}
  (group,) = [g for g in scanned.scan_plan() if g.repeat > 1]
  experts = found[f"{group.name}/layer_0/moe/experts/w2"]
  layer = group.layers[0].layer
  assert experts.shape[:2] == (group.repeat, text["n_routed_experts"])
  assert experts.tensors[0].name == f"layers.{layer}.ffn.experts.0.w2.weight"
  assert (
    experts.tensors[-1].name == f"layers.4.ffn.experts.{text['n_routed_experts'] - 1}.w2.weight"
  )


def test_any_part_of_a_parameter_equals_that_part_of_the_whole():
  """Quantized tiles, packed nibbles, tables and plain tensors, cut across tiles and heads."""
  folder = CASES / "quantized_model"
  tensors = read_headers(folder / "weights.safetensors")
  cfg = released_config(json.loads((folder / "config.json").read_text()), scan_layers=False)
  for parameter in parameters(cfg):
    whole = read_part(tensors, parameter, tuple(slice(None) for _ in parameter.shape))
    cut = tuple(slice(size // 3, size - size // 4) for size in parameter.shape)
    np.testing.assert_array_equal(read_part(tensors, parameter, cut), whole[cut], parameter.path)


def test_a_part_reads_the_experts_that_it_holds_and_no_others():
  tensors = read_headers(CASES / "quantized_model" / "weights.safetensors")
  cfg = released_config(json.loads((CASES / "quantized_model" / "config.json").read_text()))
  (experts,) = [p for p in parameters(cfg) if p.path == "layer_1/moe/experts/w1"]
  index = (slice(2, 3), slice(0, 32), slice(None))
  own = {n: t for n, t in tensors.items() if n.startswith("layers.1.ffn.experts.2.w1.")}
  assert len(own) == 2
  np.testing.assert_array_equal(read_part(own, experts, index), read_part(tensors, experts, index))


def test_a_configuration_survives_the_way_out_and_back():
  values = config_values(MODEL, "released")
  assert released_config(json.loads(json.dumps(values)), scan_layers=False) == MODEL
  assert "quantization_config" not in config_values(MODEL, "bfloat16")


def test_a_release_without_sections_keeps_its_pictures_and_its_drafter():
  flat = CONFIG["text_config"] | {"vision_config": {"num_hidden_layers": 7}}
  flat |= {"num_nextn_predict_layers": 2, "dspark_markov_rank": 9}
  values = config_values(MODEL, "released", flat)
  assert values["vision_config"] == {"num_hidden_layers": 7}
  assert values["text_config"]["dspark_markov_rank"] == 9
  assert values["text_config"]["compress_ratios"] == [*MODEL.compress_ratios, 0, 0]
  assert released_config(values, scan_layers=False) == MODEL


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
