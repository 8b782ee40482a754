"""What the files of the release hold, computed from the configuration alone; nothing is read."""

import json

import jax
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax.checkpoint.names import named_leaves
from deepseek_jax.checkpoint.released import COLLECTIONS
from deepseek_jax.checkpoint.released_carried import carried_tensors
from deepseek_jax.checkpoint.released_config import config_values
from deepseek_jax.checkpoint.released_folder import open_released
from deepseek_jax.checkpoint.released_index import (
  SHARD_BYTES,
  index,
  logical_parameters,
  release_tensors,
  shard_plan,
)
from deepseek_jax.checkpoint.released_names import parameters
from deepseek_jax.checkpoint.released_parts import DRAFTER, VISION, DrafterSizes, VisionSizes
from deepseek_jax.checkpoint.safetensors_file import write_header
from deepseek_jax.config import flash
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model
from train.plan_parts import drafter_parameters, vision_parameters

FLASH = flash()
NANO = Settings.from_dict(nano.get_config().to_dict()).model


@pytest.fixture(scope="module")
def release():
  return list(release_tensors(FLASH, VisionSizes(), DrafterSizes()))


def test_keys_parameters_and_bytes_are_those_of_the_release(release):
  # model.md sections 1.6 and 4
  keys = index(release)
  assert len(keys) == 96_085
  assert sum(name.startswith("mtp.") for name in keys) == 2_401
  assert logical_parameters(release) == 763_205_315_794
  assert sum(header.bytes for header in keys.values()) == 510_286_023_000
  part = lambda names: logical_parameters(t for t in release if t.name.startswith(names))
  tables = logical_parameters(t for t in release if ".engram.embed." in t.name)
  assert part(DRAFTER) == drafter_parameters(FLASH) == 14_225_362_530
  assert part(VISION) == vision_parameters(FLASH) == 485_268_480
  assert tables == 196_613_849_600
  assert logical_parameters(release) - part(DRAFTER) - tables == 552_366_103_664


def test_shapes_are_those_of_the_published_inventory(release):
  # model.md section 4
  keys = {name: (header.dtype, header.shape) for name, header in index(release).items()}
  assert keys["layers.0.attn.wq_b.weight"] == ("F8_E4M3", (32768, 1280))
  assert keys["layers.0.attn.wq_b.scale"] == ("F8_E8M0", (1024, 40))
  assert keys["layers.39.attn.wo_a.weight"] == ("F8_E4M3", (8192, 4096))
  assert keys["layers.39.attn.wo_a.scale"] == ("F8_E8M0", (256, 128))
  assert keys["layers.7.ffn.experts.383.w2.weight"] == ("I8", (5120, 1152))
  assert keys["layers.7.ffn.experts.383.w2.scale"] == ("F8_E8M0", (5120, 72))
  assert keys["layers.7.hc_ffn_fn"] == ("F32", (24, 20480))
  assert keys["layers.36.attn.indexer.wq_b.scale"] == ("F8_E8M0", (128, 40))
  assert keys["layers.14.engram.embed.weight"] == ("F8_E4M3", (384016682, 256))
  assert keys["layers.1.engram.embed.scale"] == ("F8_E8M0", (384006168, 8))
  assert keys["layers.1.engram.wkv.scale"] == ("F8_E8M0", (800, 192))
  assert keys["mtp.0.main_proj.scale"] == ("F8_E8M0", (160, 480))
  assert keys["vision.blocks.31.mlp.w1.weight"] == ("BF16", (5632, 1024))
  gates = {f"layers.{n}.attn.compressor.wgate.weight" for n in (2, 8, 14)}
  assert gates == {name for name in keys if "wgate" in name}
  own_keys = {f"layers.{n}.attn.indexer.wk.weight" for n in (2, 8, 14, 20)}
  assert own_keys == {name for name in keys if "indexer.wk" in name}


@pytest.mark.parametrize(
  "cfg", [NANO, pytest.param(FLASH, marks=pytest.mark.slow)], ids=["nano", "flash"]
)
def test_every_leaf_of_the_model_is_in_the_table_once_and_no_other_is(cfg):
  layout = build_layout([Document(np.arange(2))], slots=2, ratios=cfg.ratios)
  rows = np.zeros((1, 2, len(cfg.engram.layers), cfg.engram.lookups), np.int32)
  init = lambda key: nn.unbox(Model(cfg).init(key, layout._replace(engram_rows=rows)))
  tree = jax.eval_shape(init, jax.random.key(0))
  wanted = {
    (item, path): leaf.shape
    for item, collection in COLLECTIONS.items()
    for path, leaf in named_leaves(tree[collection]).items()
  }
  table = parameters(cfg)
  assert len(table) == len(wanted)
  assert {(p.item, p.path): p.shape for p in table} == wanted
  names = [tensor.name for parameter in table for tensor in parameter.tensors]
  assert len(names) == len(set(names))


# model.md sections 1.3 and 1.4
RELEASE = {
  "text_config": {"num_nextn_predict_layers": 3, "dspark_n_routed_experts": 128,
                  "dspark_markov_rank": 256, "dspark_target_layer_ids": [37, 38, 39]},
  "vision_config": {"num_hidden_layers": 32, "hidden_size": 1024, "intermediate_size": 2816,
                    "patch_size": 14, "downsample_ratio": 3},
}  # fmt: skip


@pytest.mark.slow
def test_the_loader_uses_every_tensor_of_the_release_once(release, tmp_path):
  """Files of 510 GB that take no room: their headers are real, their tensors are holes."""
  for shard in shard_plan(release):
    write_header(tmp_path / shard.file, shard.entries)
  (tmp_path / "config.json").write_text(json.dumps(config_values(FLASH, "released", RELEASE)))
  found = open_released(tmp_path)
  assert found.cfg == FLASH
  own = {name for p in parameters(FLASH) for t in p.tensors for name in (t.name, t.scale_name)}
  assert set(found.tensors) == own & set(index(release))
  assert len(found.parts["drafter"]) == 2_401 and len(found.parts["vision"]) == 266
  assert len(found.tensors) + 2_401 + 266 == 96_085
  carried = carried_tensors(found, FLASH)
  again = index([*release_tensors(FLASH), *carried.tensors])
  assert again == index(release)  # what an export of it would write


@pytest.mark.parametrize("dtype", ["released", "bfloat16"])
def test_shards_hold_every_tensor_once_with_its_scale_and_no_more_than_5_gb(release, dtype):
  shards = shard_plan(release, dtype)
  entries = [name for shard in shards for name in shard.entries]
  assert sorted(entries) == sorted(index(release, dtype))
  for shard in shards:
    size = sum(header.bytes for header in shard.entries.values())
    assert size <= SHARD_BYTES or len(shard.tensors) == 1
    for tensor in shard.tensors:
      assert (
        tensor.stored in ("bf16", "f32")
        or dtype == "bfloat16"
        or (tensor.scale_name in shard.entries)
      )
  assert shards[0].file == f"model-00001-of-{len(shards):05}.safetensors"
