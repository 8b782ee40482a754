"""The schedule as data, the scan plan derived from it, and every problem in plain sentences."""

import dataclasses

import pytest

from deepseek_jax.config import ModelConfig, MoeConfig, flash

FLASH = flash()
SMALL = ModelConfig(
  compress_ratios=(0, 2, 2, 1, 1),
  kv_sources=(1, 3),
  index_sources=(1, 3, 4),
  decoder_start=3,
  indexer=dataclasses.replace(FLASH.indexer, pool_source=3),
  engram=dataclasses.replace(FLASH.engram, layers=(1, 2)),
)


def changed(cfg=SMALL, **changes):
  """`section__field=value` changes a field of a section."""
  for name, value in changes.items():
    section, _, field = name.partition("__")
    if field:
      value = dataclasses.replace(getattr(cfg, section), **{field: value})
    cfg = dataclasses.replace(cfg, **{section: value})
  return cfg


def test_the_release_has_no_problems_and_the_published_schedule():
  # model.md section 2.6.1
  assert FLASH.problems() == []
  schedule = FLASH.schedule()
  kinds = {spec.layer: spec.kind for spec in schedule}
  assert [n for n in kinds if kinds[n] == "swa"] == [0, 1]
  assert [n for n in kinds if kinds[n] == "full"] == [2, 8, 14, 20]
  assert [n for n in kinds if kinds[n] == "reindex"] == [24, 28, 32, 36]
  sources = [(s.kv_source, s.index_source) for s in schedule]
  expected = [(None, None)] * 2 + [(2, 2)] * 6 + [(8, 8)] * 6 + [(14, 14)] * 6
  expected += [(20, n) for n in (20, 24, 28, 32, 36) for _ in range(4)]
  assert sources == expected
  assert [s.pool for s in schedule if s.pool] == ["publish"] + ["restrict"] * 4
  assert [s.layer for s in schedule if s.engram is not None] == [1, 14]
  assert [s.layer for s in schedule if s.starts_decoder] == [20]


def test_the_release_is_scanned_in_six_and_four_layers():
  plan = [(group.name, len(group.layers), group.repeat) for group in FLASH.scan_plan()]
  assert plan == [
    ("layers_0_0", 1, 1),
    ("layers_1_1", 1, 1),
    ("layers_2_13", 6, 2),
    ("layers_14_19", 6, 1),
    ("layers_20_23", 4, 1),
    ("layers_24_39", 4, 4),
  ]


def test_without_scan_every_group_stands_alone_and_the_layers_are_the_same():
  plan = changed(FLASH, scan_layers=False).scan_plan()
  assert all(group.repeat == 1 for group in plan)
  assert tuple(spec for group in plan for spec in group.layers) == FLASH.schedule()


def test_a_group_whose_entries_are_read_later_is_not_repeated():
  cfg = changed(FLASH, compress_ratios=(1,) * 6, kv_sources=(0, 1), index_sources=(0, 1, 2, 4),
                decoder_start=None, indexer__pool_source=None, engram__layers=())  # fmt: skip
  assert [(group.name, group.repeat) for group in cfg.scan_plan()] == [
    ("layers_0_0", 1),  # its neighbour is like it, but that one's entries serve layers 2 to 5
    ("layers_1_1", 1),
    ("layers_2_5", 2),
  ]


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"kv_sources": (1, 3, 9)}, "model.kv_sources names layer 9, but layers go from 0 to 4."),
    (
      {"index_sources": (0, 1, 3)},
      "model.index_sources names layer 0, whose compress_ratios entry is 0 (window only).",
    ),
    (
      {"index_sources": (1, 4, 3)},
      "model.index_sources must be ascending without repeats, got (1, 4, 3).",
    ),
    (
      {"index_sources": (1, 4)},
      "model.index_sources must contain every KV source, missing are layers [3].",
    ),
    (
      {"compress_ratios": (0, -2, 2, 1, 1)},
      "model.compress_ratios of layer 1 is -2, accepted are 0, 1, ...",
    ),
    (
      {"kv_sources": (3,)},
      "Layer 1 reads compressed entries, but no KV source stands before it.",
    ),
    (
      {"compress_ratios": (0, 2, 1, 1, 1)},
      "Layer 2 has compression ratio 1, but its KV source, layer 1, has ratio 2.",
    ),
    (
      {"indexer__pool_source": 4},
      "model.indexer.pool_source is layer 4, which is none of kv_sources (1, 3).",
    ),
    (
      {"decoder_start": 4},
      "model.decoder_start is 4: exactly one KV source must lie at or after it, at 4 itself, but "
      "kv_sources is (1, 3).",
    ),
    (
      {"decoder_start": 1, "kv_sources": (1,), "compress_ratios": (0, 2, 2, 2, 2)},
      "model.decoder_start is layer 1, whose compression ratio must be 1.",
    ),
    (
      {"indexer__pool_blocks": 2, "indexer__pool_block_size": 8},
      "model.indexer: a pool of 2 blocks of 8 can hold fewer visible entries than top_k (512); "
      "(pool_blocks - 1) * pool_block_size + 1 must reach top_k.",
    ),
    ({"vocab": 0}, "model.vocab must be at least 1, got 0."),
    ({"attention__o_groups": 0}, "model.attention.o_groups must be at least 1, got 0."),
    (
      {"attention__o_groups": 3},
      "model.attention.heads (64) must be a multiple of o_groups (3).",
    ),
    (
      {"attention__rope_dim": 63},
      "model.attention.rope_dim (63) must be even and at most head_dim (512) and "
      "indexer.head_dim (128).",
    ),
    (
      {"moe__experts_per_token": 400},
      "model.moe.experts_per_token (400) must not exceed experts (384).",
    ),
    (
      {"attention__head_dim": 80, "attention__rope_dim": 16},
      "model.numerics.window_fp8 needs a head_dim that is a multiple of 32, got 80.",
    ),
    (
      {"numerics__activations_fp8": True, "moe__hidden": 48},
      "model.numerics.activations_fp8 needs model.moe.hidden to be a multiple of 32, got 48.",
    ),
    (
      {"engram__layers": (1,)},
      "model.engram.layers has 1 entries and table_rows 2; there is one table per layer.",
    ),
    (
      {"engram__layers": (1, 7)},
      "model.engram.layers names layer 7, but layers go from 0 to 4.",
    ),
    ({"engram__max_ngram": 1}, "model.engram.max_ngram must be at least 2, got 1."),
  ],
  ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_configuration_that_cannot_be_built_says_why(changes, sentence):
  assert SMALL.problems() == []
  assert sentence in changed(**changes).problems()


def test_all_problems_are_listed_at_once():
  problems = changed(
    vocab=0, attention__o_groups=0, decoder_start=4, engram__max_ngram=0
  ).problems()
  assert len(problems) >= 4


def test_sections_are_built_from_mappings_and_lists_become_tuples():
  cfg = ModelConfig.from_dict({"dim": 64, "moe": {"experts": 4}, "kv_sources": [2, 8, 14, 20]})
  assert cfg == changed(FLASH, dim=64, moe__experts=4)
  assert isinstance(cfg.moe, MoeConfig) and hash(cfg) == hash(
    changed(FLASH, dim=64, moe__experts=4)
  )


def test_an_unknown_key_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match=r"ModelConfig: unknown key \['dims'\], known are \[.*'dim'"):
    ModelConfig.from_dict({"dims": 64})
  with pytest.raises(
    ValueError, match=r"MoeConfig: unknown key \['expert'\], known are \['experts'"
  ):
    ModelConfig.from_dict({"moe": {"expert": 4}})
