"""What the model of a run costs to serve: cache and FLOPs over context, as `plan` counts them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from deepseek_jax.config import ModelConfig
from train import plan_cache, plan_cost, plan_plot
from train.reporting.drawing import Drawn, draw, in_binary

_RATIO = 20  # between two lines, from which on a logarithmic axis shows both


def cache(cfg: ModelConfig) -> Iterator[Drawn]:
  """Bytes of the key-value cache."""
  yield draw(
    "kv_bytes",
    "Bytes that each token adds to the global key-value cache: V4-Flash's, and how they came down "
    "to this configuration's.",
    partial(_ladder, cfg=cfg),
  )
  yield draw(
    "kv_cache",
    "Global key-value cache of one sequence. V4-Flash's is that of its release, whatever the size "
    "of this model.",
    partial(_cache_size, cfg=cfg),
  )


def flops(cfg: ModelConfig) -> Iterator[Drawn]:
  """Arithmetic of a token."""
  table = plan_cost.flops_table(cfg)
  yield draw(
    "flops",
    "Model FLOPs of a token, the mean over a text of this length; of decoding those of the token "
    "at its end.",
    partial(plan_plot.draw_flops, flops=table),
  )
  yield draw(
    "decode_cost",
    "FLOPs of one decoded token, weighted by the precision of their operands, beside those of "
    "V4-Flash's release.",
    partial(_decode, cfg=cfg),
  )
  yield draw(
    "prefill",
    "Layers that a new token passes while a prompt is read, as a share of all: only its last "
    "window enters the decoder.",
    partial(plan_plot.draw_prefill, cfg=cfg),
  )


def numbers(cfg: ModelConfig) -> dict[str, dict[str, str]]:
  """Row -> column -> number, of what the curves show."""
  per_token = plan_cache.kv_bytes_per_token(cfg)["global"]
  before = next(iter(plan_cache.ladder(cfg).values()))
  rows = {}
  for context in plan_cost.CONTEXTS[::2]:
    rows[in_binary(context)] = {
      "cache (MiB)": f"{per_token * context / 2**20:,.4g}",
      "V4-Flash's cache (MiB)": f"{before * context / 2**20:,.4g}",
      "decode (weighted GFLOP)": f"{plan_cost.weighted_decode_cost(cfg, context) / 1e9:,.4g}",
      "V4-Flash's": f"{plan_cost.v4_flash_weighted_decode_cost(context) / 1e9:,.4g}",
      "prefill ratio": f"{plan_cost.prefill_ratio(cfg, context):.4f}",
    }
  return rows


def _ladder(axes: Any, cfg: ModelConfig) -> None:
  plan_plot.draw_cache(axes, cfg)
  axes.set(title="Cache of a token", xlabel="bytes")


def _cache_size(axes: Any, cfg: ModelConfig) -> None:
  contexts = list(plan_cost.CONTEXTS)
  for label, size in (
    ("this configuration", plan_cache.kv_bytes_per_token(cfg)["global"]),
    ("V4-Flash", next(iter(plan_cache.ladder(cfg).values()))),
  ):
    axes.plot(contexts, [size * n / 2**20 for n in contexts], marker="o", label=label)
  axes.set(title="Global cache of a sequence", xlabel="context (tokens)", ylabel="MiB")
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  axes.legend()


def _decode(axes: Any, cfg: ModelConfig) -> None:
  plan_plot.draw_decode(axes, cfg)
  low, high = axes.dataLim.intervaly
  if high > _RATIO * low:
    axes.set_yscale("log")
