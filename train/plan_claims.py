"""The figures that the published descriptions of V4.1-Flash state, computed from the configuration.

Source of every "stated" text: the technical report (arXiv 2609.19969), collected in claims.md; the
sizes of V4-Flash are its report's (arXiv 2606.19348).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from deepseek_jax.config import ModelConfig
from deepseek_jax.flops import activated_parameters, parameters
from train import plan_cache, plan_cost
from train.plan_parts import MAX_VISUAL_TOKENS, PATCHES_PER_TOKEN, vision_parameters

# An agent's turn, as the report describes it: tokens of tool output, tokens written.
_TURN_NEW, _TURN_WRITTEN = 4_000, 400


class Claim(NamedTuple):
  quantity: str
  stated: str
  computed: float
  holds: bool


def claims(cfg: ModelConfig) -> list[Claim]:
  """Every stated figure beside the computed one; they are about the released configuration."""
  return [*_sizes(cfg), *_cache(cfg), *_cost(cfg), *_limits(cfg)]


def _sizes(cfg: ModelConfig) -> Iterator[Claim]:
  start, active, total = cfg.decoder_start or 0, activated_parameters(cfg), parameters(cfg)
  yield _exactly("encoder layers", 20, start)
  yield _exactly("decoder layers", 20, cfg.num_layers - start)
  yield _about("activated parameters, prefill", "about 8 B", 8e9, active["prefill"], 0.05)
  yield _about("activated parameters, decode", "about 16 B", 16e9, active["decode"], 0.05)
  v4_flash = sum(plan_cost.v4_flash_matrices().values())
  yield _about("activated parameters, V4-Flash", "13 B", 13e9, v4_flash, 0.04)
  backbone = total["backbone"] + vision_parameters(cfg)
  yield _about("backbone with vision", "552 B", 552e9, backbone, 1e-3)
  yield _about("Engram tables", "196 B", 196e9, total["engram"], 5e-3)


def _cache(cfg: ModelConfig) -> Iterator[Claim]:
  steps = plan_cache.ladder(cfg)
  for (name, value), stated in zip(steps.items(), (3514, 652, 1630, 890), strict=True):
    yield _rounds_to(f"bytes a token, {name}", stated, value)
  earlier, ours = plan_cache.earlier_models(), plan_cache.kv_bytes_per_token(cfg)["global"]
  for name, stated in (("V1", 389_120), ("V3.2", 48_068)):
    yield _exactly(f"bytes a token, {name}", stated, earlier[name])
  before = next(iter(steps.values()))
  yield _about("V4-Flash's cache over ours", "3.9x", 3.9, before / ours, 0.02)
  yield _about("V1's cache over ours", "about 437x", 437, earlier["V1"] / ours, 1e-3)
  share = plan_cache.persistent_share(cfg)
  yield _about("global cache against V4-Flash", "about 1/4", 1 / 4, share["global"], 0.02)
  yield _about("persistent cache against V4-Flash", "about 1/8", 1 / 8, share["persistent"], 0.02)


def _cost(cfg: ModelConfig) -> Iterator[Claim]:
  for new in (128, 4_000, 1_000_000):
    ratio, stated = plan_cost.prefill_ratio(cfg, new), 1 / 2 + 64 / new
    yield _about(f"prefill of {new:,} tokens over full depth", "1/2 + 64/N", stated, ratio, 1e-12)
  windows = plan_cost.exact_window_tokens(cfg)
  yield _exactly("exact decoder windows, tokens", 2560, windows["bound"])
  yield _exactly("their receptive field, tokens", 2414, windows["receptive_field"])
  short, long = (plan_cost.weighted_decode_cost(cfg, n) for n in (2**12, 2**20))
  yield _about("decode cost, 1M over 4K", "about +1/4", 1.25, long / short, 0.02)
  over = short / plan_cost.v4_flash_weighted_decode_cost(2**12)
  yield Claim("decode cost over V4-Flash's at 4K", "above 1", over, over > 1)
  crossing = plan_cost.crossing_with_v4_flash(cfg)
  yield _about("decode is cheaper than V4-Flash's from", "near 100K", 1e5, crossing, 0.1)
  share = _TURN_NEW / (_TURN_NEW + _TURN_WRITTEN)
  yield Claim("prefilled share of an agent's turn", "prefill-heavy", share, share > 1 / 2)


def _limits(cfg: ModelConfig) -> Iterator[Claim]:
  indexer = cfg.indexer
  yield _exactly("candidate pool", 16_384, indexer.pool_blocks * indexer.pool_block_size)
  yield _exactly("entries chosen", 512, indexer.top_k)
  bound = math.sqrt(cfg.attention.head_dim)  # of a vector whose mean square is 1
  yield _about("largest value of a normalized latent", "22.6", 22.6, bound, 2e-3)
  yield _exactly("visual tokens of an image, at most", 1024, MAX_VISUAL_TOKENS)
  yield _about("visual tokens per patch", "1/9", 1 / 9, 1 / PATCHES_PER_TOKEN, 1e-12)


def _exactly(quantity: str, stated: int, computed: float) -> Claim:
  return Claim(quantity, f"{stated:,}", computed, computed == stated)


def _rounds_to(quantity: str, stated: int, computed: float) -> Claim:
  return Claim(quantity, f"{stated:,}", computed, round(computed) == stated)


def _about(quantity: str, stated: str, value: float, computed: float, tolerance: float) -> Claim:
  """tolerance: relative, as wide as the words of the statement."""
  return Claim(quantity, stated, computed, abs(computed - value) <= tolerance * value)
