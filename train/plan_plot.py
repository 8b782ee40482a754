"""Draws a plan: cache per token, prefill ratio, FLOPs and decode cost over context."""

import importlib
import importlib.util
import pathlib
from typing import Any

from deepseek_jax.config import ModelConfig
from train import plan_cache, plan_cost

_DPI = 150
_SIZE = (11, 7.5)  # inches


def problem(path: pathlib.Path) -> str | None:
  """Why nothing can be drawn into the file, in a sentence; None if it can."""
  if importlib.util.find_spec("matplotlib") is None:
    return "--plot draws with matplotlib, which is not installed; `pip install '.[plots]'` does it."
  kinds = sorted(_figure().canvas.get_supported_filetypes())
  if path.suffix.lstrip(".") not in kinds:
    return f"--plot {path}: the name must end in one of {', '.join('.' + kind for kind in kinds)}."
  return None


def draw(cfg: ModelConfig, flops: dict[str, dict[int, float]], path: pathlib.Path) -> None:
  """Writes the figure. Raises OSError where the file cannot be written."""
  figure = _figure()
  (cache, ratio), (cost, decode) = figure.subplots(2, 2)
  _draw_cache(cache, cfg)
  contexts = list(plan_cost.CONTEXTS)
  lengths = [cfg.attention.window, 512, 2048, *contexts]
  ratio.plot(lengths, [plan_cost.prefill_ratio(cfg, n) for n in lengths], marker="o")
  ratio.set(title="Prefill: layers passed, share of all", xlabel="new tokens", ylim=(0, 1.05))
  for mode, by_context in flops.items():
    cost.plot(contexts, [by_context[n] / 1e9 for n in contexts], marker="o", label=mode)
  cost.set(title="Model FLOPs per token", xlabel="context (tokens)", ylabel="GFLOP", yscale="log")
  ours = [plan_cost.weighted_decode_cost(cfg, n) / 1e9 for n in contexts]
  theirs = [plan_cost.v4_flash_weighted_decode_cost(n) / 1e9 for n in contexts]
  decode.plot(contexts, ours, marker="o", label="this configuration")
  decode.plot(contexts, theirs, marker="o", label="V4-Flash")
  decode.set(title="Decode, bf16 1, FP8 1/2, FP4 1/4", xlabel="context (tokens)")
  decode.set_ylabel("weighted GFLOP per token")
  for axes in (ratio, cost, decode):
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
  cost.legend()
  decode.legend()
  figure.savefig(path, dpi=_DPI)


def _draw_cache(axes: Any, cfg: ModelConfig) -> None:
  steps = plan_cache.ladder(cfg)
  bars = axes.barh(list(steps), list(steps.values()))
  axes.bar_label(bars, fmt="{:,.0f}", padding=3)
  axes.invert_yaxis()
  axes.margins(x=0.15)
  axes.set(title="Global cache per token (bytes)")


def _figure() -> Any:
  """An empty figure of the size that a plan takes; needs no screen."""
  return importlib.import_module("matplotlib.figure").Figure(_SIZE, layout="constrained")
