"""What prefill and decode cost, and the same for V4-Flash, which the release is compared with.

A weighted cost counts a product of bfloat16 operands as 1, of FP8 as 0.5, of FP4 as 0.25 of its
FLOPs (claims.md).
"""

import numpy as np

from deepseek_jax.config import ModelConfig
from deepseek_jax.flops import decode_flops_by_precision, flops_per_token, scanned_entries

CONTEXTS = tuple(2**power for power in range(12, 21))  # 4K ... 1M tokens
SHARDS = (2, 4, 8, 16, 32)  # that a context of 1M tokens may be cut into
MODES = ("train", "prefill", "decode")
_WEIGHT = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}


def flops_table(cfg: ModelConfig) -> dict[str, dict[int, float]]:
  """Model FLOPs per token: mode -> context -> FLOPs."""
  return {mode: {n: flops_per_token(cfg, mode, n) for n in CONTEXTS} for mode in MODES}


def prefill_ratio(cfg: ModelConfig, new_tokens: int) -> float:
  """Layers that a new token passes in a prefill, as a share of all layers.

  Encoder layers take every token, decoder layers the last window: 1/2 + 64/N for the release.
  """
  if cfg.decoder_start is None:
    return 1.0
  encoder = cfg.decoder_start / cfg.num_layers
  tail = min(cfg.attention.window, new_tokens) / new_tokens
  return encoder + (1 - encoder) * tail


def indexer_imbalance(cfg: ModelConfig, context: int, shards: int) -> float:
  """Scores of the busiest of the contiguous shards of one document, over their mean.

  The last shard sees most: near 2 - 1/shards without a pool.
  """
  seen = np.arange(1, context // shards * shards + 1)
  scores = np.sum([scanned_entries(cfg, spec, seen) for spec in cfg.schedule()], axis=0)
  of_shards = scores.reshape(shards, -1).sum(axis=1)
  return float(of_shards.max() / of_shards.mean()) if of_shards.any() else 1.0


def weighted_decode_cost(cfg: ModelConfig, context: int) -> float:
  """Weighted FLOPs of the token at the end of `context` tokens."""
  return _weighted(decode_flops_by_precision(cfg, context))


def exact_window_tokens(cfg: ModelConfig) -> dict[str, int]:
  """Tokens that an exact reconstruction of the decoder's windows would run.

  Returns: "bound" a window for each decoder layer; "receptive_field" of the layers after the first,
    whose windows overlap by one token each.
  """
  layers, window = cfg.num_layers - (cfg.decoder_start or 0), cfg.attention.window
  return {"bound": layers * window, "receptive_field": window + (layers - 2) * (window - 1)}


# V4-Flash, from its public configuration (transformers, DeepseekV4Config).
_V4_LAYERS, _V4_CSA, _V4_HCA = 43, 21, 20  # all; with a ratio of 4 and an indexer; of 128
_V4_CSA_RATIO, _V4_HCA_RATIO, _V4_WINDOW, _V4_TOP_K = 4, 128, 128, 512
_V4_DIM, _V4_HIDDEN, _V4_VOCAB, _V4_STREAMS = 4096, 2048, 129280, 4
_V4_EXPERTS, _V4_EXPERTS_PER_TOKEN = 256, 6  # and a shared one
_V4_HEADS, _V4_HEAD_DIM, _V4_Q_RANK, _V4_O_RANK, _V4_O_GROUPS = 64, 512, 1024, 1024, 8
_V4_INDEX_HEADS, _V4_INDEX_DIM = 64, 128


def v4_flash_matrices() -> dict[str, int]:
  """Matrix parameters that a token passes through in V4-Flash, by the precision of the product."""
  d, width = _V4_DIM, _V4_HEADS * _V4_HEAD_DIM
  experts = (_V4_EXPERTS_PER_TOKEN + 1) * 3 * d * _V4_HIDDEN
  projections = d * (_V4_Q_RANK + _V4_HEAD_DIM) + _V4_Q_RANK * width
  projections += _V4_O_GROUPS * _V4_O_RANK * d
  fp8 = _V4_LAYERS * (experts + projections)
  fp8 += _V4_CSA * _V4_Q_RANK * _V4_INDEX_HEADS * _V4_INDEX_DIM
  mixing = 2 * _V4_STREAMS * (_V4_STREAMS + 2) * _V4_STREAMS * d
  bf16 = _V4_LAYERS * (width * _V4_O_RANK + d * _V4_EXPERTS + mixing) + _V4_VOCAB * d
  # Values and gates of an entry; ratio 4 makes them twice, since its groups overlap.
  bf16 += _V4_CSA * d * (2 * 2 * (_V4_HEAD_DIM + _V4_INDEX_DIM) + _V4_INDEX_HEADS)
  bf16 += _V4_HCA * d * 2 * _V4_HEAD_DIM
  return {"bf16": bf16, "fp8": fp8}


def v4_flash_weighted_decode_cost(context: int) -> float:
  """`weighted_decode_cost` of V4-Flash: layers of ratio 128 read every entry, the others top-k."""
  matrices = v4_flash_matrices()
  entries = context // _V4_CSA_RATIO
  keys = _V4_LAYERS * min(_V4_WINDOW, context) + _V4_CSA * min(entries, _V4_TOP_K)
  keys += _V4_HCA * (context // _V4_HCA_RATIO)
  attention = 4 * _V4_HEADS * _V4_HEAD_DIM * keys
  scores = 2 * _V4_INDEX_HEADS * _V4_INDEX_DIM * _V4_CSA * entries
  return _weighted(
    {"bf16": 2 * matrices["bf16"] + attention, "fp8": 2 * matrices["fp8"], "fp4": scores}
  )


def crossing_with_v4_flash(cfg: ModelConfig) -> int:
  """The context, in whole thousands of tokens, from which decoding costs less than V4-Flash's.

  Raises: ValueError if there is none up to 1M tokens.
  """
  for context in range(1000, CONTEXTS[-1], 1000):
    if weighted_decode_cost(cfg, context) < v4_flash_weighted_decode_cost(context):
      return context
  raise ValueError("Decoding costs more than V4-Flash's at every context.")


def _weighted(flops: dict[str, float]) -> float:
  return sum(_WEIGHT[precision] * count for precision, count in flops.items())
