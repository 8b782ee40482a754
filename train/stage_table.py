"""The stages of a run as text: what holds in each of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from deepseek_jax.optim.schedule import learning_rate
from train.optimizer_table import aligned
from train.stages import RunStage, tokens_per_step

_RATES = 512  # updates of a stage that its learning rate is looked up at


class Row(NamedTuple):
  """Words of a stage, in the order of the columns."""

  stage: str
  tokens: str
  steps: str
  batch: str
  row: str
  lr: str
  indexer: str
  replay: str
  pool: str
  kv: str
  bias_speed: str
  frozen: str


HEADINGS = Row(
  "stage",
  "from token",
  "steps",
  "tokens a step",
  "tokens a row",
  "learning rate",
  "indexer loss",
  "replay",
  "pool",
  "entries / window / indexer / experts",
  "router bias",
  "frozen",
)


def stage_table(plan: Sequence[RunStage]) -> str:
  """One line for each stage, under headings."""
  return aligned(rows(plan))


def rows(plan: Sequence[RunStage]) -> list[Row]:
  """The headings, then the words of each stage."""
  return [HEADINGS, *(_row(plan, stage) for stage in plan)]


def numbers(plan: Sequence[RunStage]) -> list[dict[str, Any]]:
  """What the table says, for a file; token counts have padding included."""
  return [
    {
      "name": stage.name,
      "tokens": stage.tokens,
      "first_step": stage.first_step,
      "last_step": stage.last_step,
      "tokens_per_step": stage.span.tokens,
      "slots": stage.settings.data.slots,
      "lr": lr_range(plan, stage),
      "indexer": stage.settings.objective.indexer,
      "indexer_weight": stage.settings.objective.indexer_weight,
      "replay_share": stage.settings.data.replay.share,
      "pool_source": stage.settings.model.indexer.pool_source,
      "numerics": dataclasses.asdict(stage.settings.model.numerics),
      "bias_speed": stage.settings.optim.bias_speed,
      "frozen": stage.settings.optim.frozen,
    }
    for stage in plan
  ]


def lr_range(plan: Sequence[RunStage], stage: RunStage) -> tuple[float, float]:
  """Lowest and highest learning rate of a stage."""
  first = stage.first_step - 1
  updates = np.linspace(first, stage.last_step - 1, _RATES).astype(np.int32)
  rates = learning_rate(stage.settings.optim, [part.span for part in plan])(updates)
  return float(np.min(rates)), float(np.max(rates))


def _row(plan: Sequence[RunStage], stage: RunStage) -> Row:
  settings, numerics = stage.settings, stage.settings.model.numerics
  objective, source = settings.objective, settings.model.indexer.pool_source
  low, high = lr_range(plan, stage)
  either = lambda switch, name: name if switch else numerics.compute_dtype
  kv = (
    either(numerics.main_fp4, "FP4"),
    either(numerics.window_fp8, "FP8"),
    either(numerics.indexer_fp4, "FP4"),
    either(numerics.experts_fp4, "FP4"),
  )
  weight = "" if objective.indexer == "off" else f" x {objective.indexer_weight:g}"
  return Row(
    stage.name,
    f"{stage.tokens:,}",
    f"{stage.first_step:,} - {stage.last_step:,}",
    f"{tokens_per_step(settings):,}",
    f"{settings.data.slots:,}",
    f"{low:.3g} - {high:.3g}",
    f"{objective.indexer}{weight}",
    f"{settings.data.replay.share:g} of steps" if settings.data.replay.share else "off",
    "off" if source is None else f"layer {source}",
    " / ".join(kv),
    f"{settings.optim.bias_speed:g}",
    ", ".join(settings.optim.frozen) or "none",
  )
