"""Draws a plan: cache, prefill, FLOPs and decode cost over context; the schedule over tokens."""

import importlib
import importlib.util
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepseek_jax.config import ModelConfig
from deepseek_jax.optim.schedule import learning_rate, tokens_after
from train import plan_cache, plan_cost
from train.stages import RunStage

_DPI = 150
_SIZE = (11, 11)  # inches
_POINTS = 1000  # at which the schedule is looked up


def problem(path: pathlib.Path) -> str | None:
  """Why nothing can be drawn into the file, in a sentence; None if it can."""
  if importlib.util.find_spec("matplotlib") is None:
    return "--plot draws with matplotlib, which is not installed; `pip install '.[plots]'` does it."
  kinds = sorted(_figure().canvas.get_supported_filetypes())
  if path.suffix.lstrip(".") not in kinds:
    return f"--plot {path}: the name must end in one of {', '.join('.' + kind for kind in kinds)}."
  return None


def draw(
  cfg: ModelConfig,
  flops: dict[str, dict[int, float]],
  plan: Sequence[RunStage],
  path: pathlib.Path,
) -> None:
  """Writes the figure. Raises OSError where the file cannot be written."""
  figure = _figure()
  (cache, ratio), (cost, decode), (rate, batch) = figure.subplots(3, 2)
  draw_cache(cache, cfg)
  draw_prefill(ratio, cfg)
  draw_flops(cost, flops)
  draw_decode(decode, cfg)
  _draw_rate(rate, plan)
  _draw_batch(batch, plan)
  figure.savefig(path, dpi=_DPI)


def draw_prefill(axes: Any, cfg: ModelConfig) -> None:
  """The share of the layers that a new token passes."""
  lengths = [cfg.attention.window, 512, 2048, *plan_cost.CONTEXTS]
  axes.plot(lengths, [plan_cost.prefill_ratio(cfg, n) for n in lengths], marker="o")
  axes.set(title="Prefill: layers passed, share of all", xlabel="new tokens", ylim=(0, 1.05))
  _over_context(axes)


def draw_flops(axes: Any, flops: dict[str, dict[int, float]]) -> None:
  """plan_cost.flops_table."""
  for mode, by_context in flops.items():
    axes.plot(list(by_context), [n / 1e9 for n in by_context.values()], marker="o", label=mode)
  axes.set(title="Model FLOPs per token", xlabel="context (tokens)", ylabel="GFLOP", yscale="log")
  _over_context(axes)
  axes.legend()


def draw_decode(axes: Any, cfg: ModelConfig) -> None:
  """What a token costs in decoding, beside V4-Flash's."""
  contexts = list(plan_cost.CONTEXTS)
  ours = [plan_cost.weighted_decode_cost(cfg, n) / 1e9 for n in contexts]
  theirs = [plan_cost.v4_flash_weighted_decode_cost(n) / 1e9 for n in contexts]
  axes.plot(contexts, ours, marker="o", label="this configuration")
  axes.plot(contexts, theirs, marker="o", label="V4-Flash")
  axes.set(title="Decode, bf16 1, FP8 1/2, FP4 1/4", xlabel="context (tokens)")
  axes.set_ylabel("weighted GFLOP per token")
  _over_context(axes)
  axes.legend()


def draw_cache(axes: Any, cfg: ModelConfig) -> None:
  """How the bytes of a token came down from V4-Flash's, step by step."""
  steps = plan_cache.ladder(cfg)
  bars = axes.barh(list(steps), list(steps.values()))
  axes.bar_label(bars, fmt="{:,.0f}", padding=3)
  axes.invert_yaxis()
  axes.margins(x=0.15)
  axes.set(title="Global cache per token (bytes)")


def _draw_rate(axes: Any, plan: Sequence[RunStage]) -> None:
  """Evenly spaced updates of the run, and those of the warm-up, which is too short for them."""
  spans, optim = [stage.span for stage in plan], plan[0].settings.optim
  last = plan[-1].last_step - 1
  updates = np.unique(
    np.concatenate([np.linspace(0, end, _POINTS, dtype=int) for end in (optim.warmup_steps, last)])
  )
  axes.plot(tokens_after(spans)(updates + 1), learning_rate(optim, spans)(updates))
  for stage in plan[1:]:
    axes.axvline(stage.tokens, color="gray", linestyle=":")
    axes.annotate(stage.name, (stage.tokens, 0), textcoords="offset points", xytext=(4, 4))
  axes.set(title="Learning rate", xlabel="tokens of the run", ylim=(0, None))
  axes.grid(alpha=0.3)


def _draw_batch(axes: Any, plan: Sequence[RunStage]) -> None:
  edges = [*(stage.tokens for stage in plan), plan[-1].tokens + math.prod(plan[-1].span)]
  axes.stairs([stage.span.tokens for stage in plan], edges, baseline=None, label="a step")
  slots = [stage.settings.data.slots for stage in plan]
  axes.stairs(slots, edges, baseline=None, label="a row", linestyle="--")
  axes.set(title="Tokens of a step and of a row", xlabel="tokens of the run")
  axes.set_yscale("log", base=2)
  axes.margins(y=0.1)
  axes.grid(alpha=0.3)
  axes.legend()


def _over_context(axes: Any) -> None:
  axes.set_xscale("log", base=2)
  axes.grid(alpha=0.3)


def _figure() -> Any:
  """An empty figure of the size that a plan takes; needs no screen."""
  return importlib.import_module("matplotlib.figure").Figure(_SIZE, layout="constrained")
