"""Bytes of the key-value cache of a served model, and how they came down from V4-Flash to V4.1.

A record is one entry of one layer's cache, in the formats of model.md section 3.1.
"""

from deepseek_jax.config import ModelConfig

# Blocks of channels that share a scale of one byte.
_MAIN_BLOCK, _INDEXER_BLOCK, _WINDOW_BLOCK = 16, 32, 32

# V4-Flash keeps 448 channels in FP8, 64 rotary ones in bfloat16, 7 scales and a byte of padding.
_V4_MAIN_RECORD = 448 + 64 * 2 + 7 + 1
_V4_CSA_LAYERS, _V4_CSA_RATIO = 21, 4
_V4_HCA_LAYERS, _V4_HCA_RATIO = 20, 128
_V4_WINDOW_SHARE = 1 / 2  # of its persistent cache, which V4.1 does not store (claims.md)


def kv_bytes_per_token(cfg: ModelConfig) -> dict[str, float]:
  """Bytes a token adds, in the formats that the release serves.

  Returns: "main", "indexer" and "global", their sum, over all sources; "window_per_layer", of one
    token in one layer's window.
  """
  entries = entries_per_token(cfg)
  main, indexer = entries * _main_record(cfg), entries * _indexer_record(cfg)
  width = cfg.attention.head_dim
  return {
    "main": main,
    "indexer": indexer,
    "global": main + indexer,
    "window_per_layer": width + width // _WINDOW_BLOCK,
  }


def entries_per_token(cfg: ModelConfig) -> float:
  """Compressed entries per token over all layers that make them: sum of 1 / ratio."""
  return sum(1 / cfg.compress_ratios[layer] for layer in cfg.kv_sources)


def ladder(cfg: ModelConfig) -> dict[str, float]:
  """Bytes of global cache per token, one design step after another.

  1. V4-Flash: every layer its own entries, ratios 4 (with an indexer) and 128 (without).
  2. Layers share what `kv_sources` make; ratio and formats are still V4-Flash's.
  3. Ratios of this configuration.
  4. Formats of this configuration: FP4 entries.
  """
  old = _V4_MAIN_RECORD + _indexer_record(cfg)
  separate = _V4_CSA_LAYERS * old / _V4_CSA_RATIO
  separate += _V4_HCA_LAYERS * _V4_MAIN_RECORD / _V4_HCA_RATIO
  return {
    "V4-Flash, entries in every layer": separate,
    "entries shared across layers": len(cfg.kv_sources) * old / _V4_CSA_RATIO,
    "ratios relaxed": entries_per_token(cfg) * old,
    "main entries in FP4": kv_bytes_per_token(cfg)["global"],
  }


def earlier_models() -> dict[str, int]:
  """Bytes of global cache per token of earlier models, all layers."""
  v1 = 95 * 8 * 128 * 2 * 2  # layers, key-value heads, channels, keys and values, bfloat16
  # 512 FP8 channels, 4 float32 scales, 64 bfloat16 rotary channels; indexer: 128 and one scale
  v32 = 61 * ((512 + 4 * 4 + 64 * 2) + (128 + 4))
  return {"V1": v1, "V3.2": v32}


def persistent_share(cfg: ModelConfig) -> dict[str, float]:
  """This configuration's cache as a share of V4-Flash's.

  Returns: "global" the entries that context adds; "persistent" what is kept between requests,
    where V4-Flash also stores windows, about half of it, and V4.1 computes them again.
  """
  share = kv_bytes_per_token(cfg)["global"] / next(iter(ladder(cfg).values()))
  return {"global": share, "persistent": share * (1 - _V4_WINDOW_SHARE)}


def _main_record(cfg: ModelConfig) -> float:
  width = cfg.attention.head_dim
  return width / 2 + width / _MAIN_BLOCK


def _indexer_record(cfg: ModelConfig) -> float:
  width = cfg.indexer.head_dim
  return width / 2 + width / _INDEXER_BLOCK
