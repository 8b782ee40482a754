"""Figures of quantities over the steps of a run; each is left out where the run has none of it."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from train.evaluate_loss import BASELINE, EXACT, MODEL, REPLAYED
from train.replay_report import BUCKETS, FP4, GAP, KL, POOL, TOP1
from train.reporting.columns import Columns
from train.reporting.drawing import (
  SERIES,
  SOFT,
  Drawn,
  draw,
  high_with_legend,
  line_style,
  short,
  smooth,
  thin,
)
from train.reporting.run_data import RunData

# Quantities that a run watches (docs/design.md, 3e): metric, title, unit, caption.
_WATCHED = (
  (
    "router_entropy",
    "Router entropy, worst layer",
    "share of the largest",
    "Entropy of the load of experts over the largest that it can be: 1 is even.",
  ),
  (
    "router_bias_range",
    "Router biases, worst layer",
    "largest - smallest",
    "Range of the biases that move load between experts.",
  ),
  ("sink_mass", "Attention on the sink", "share", "Mean over layers."),
  (
    "window_mass",
    "Attention on the window",
    "share",
    "Mean over layers; the entries have the rest.",
  ),
  (
    "largest_logit",
    "Largest attention logit",
    "logit",
    "Of all layers. One that keeps growing announces instability.",
  ),
  (
    "hc_error",
    "Hyper-connections",
    "distance from 1",
    "Largest distance of a mixing matrix's row or column sum from 1.",
  ),
  ("stream_rms", "Residual streams", "root mean square", "Size of their values."),
  ("engram_gate", "Engram gate", "mean", "How far the n-gram tables are let in."),
  (
    "clamp_hits",
    "Clamped hidden values",
    "share",
    "Of the shared experts' hidden values, those that reached their limit.",
  ),
)


def training(run: RunData) -> Iterator[Drawn]:
  """Loss, validation and learning rate."""
  metrics = run.metrics
  if metrics.has("loss"):
    yield draw(
      "loss",
      "Loss of each step, and its running mean. Dashed: the run was started again after this step. "
      "Dotted: a stage begins. Crosses: steps whose loss is not finite.",
      partial(_loss, run),
    )
  if metrics.has(MODEL):
    yield draw(
      "validation",
      "Bits per byte of held-out text; lower is better. The line across, where there is one, is a "
      "bigram that was counted on the tokens of the run.",
      partial(_validation, run),
    )
  if metrics.has("lr"):
    yield draw("learning_rate", "Learning rate of each update.", partial(_rate, run))


def speed(run: RunData) -> Iterator[Drawn]:
  """Throughput and where the time of a step goes."""
  metrics = run.metrics
  if metrics.has("tokens_per_second"):
    yield draw(
      "throughput",
      "Tokens a second of each step, and their running mean in colour.",
      partial(_one, run, "tokens_per_second", "Throughput", "tokens/s"),
    )
  if metrics.has("step_seconds"):
    both = {"step_seconds": "a step", "data_wait_seconds": "of it, waiting for data"}
    yield draw(
      "step_time",
      "Seconds of a step, and those that it waited for its batch. Steps right after a start or a "
      "checkpoint take longer.",
      partial(_several, run, both, "Time of a step", "seconds", log=True),
    )
  if metrics.has("mfu"):
    yield draw(
      "mfu",
      "Model FLOPs over what the devices could do at their peak rate.",
      partial(_one, run, "mfu", "Model FLOPs utilization", "share of peak"),
    )
  filled = {name: name.replace("_", " ") for name in ("encoder_fill", "decoder_fill")}
  if any(map(metrics.has, filled)):
    yield draw(
      "packing",
      "Share of a row's slots that hold tokens.",
      partial(_several, run, filled, "Filled rows", "share of slots", limits=(0, 1.05)),
    )


def gradients(run: RunData) -> Iterator[Drawn]:
  """Norms of gradients and updates, of everything and by part."""
  if run.metrics.has("grad_norm"):
    yield draw(
      "gradient_norm",
      "Global norm before clipping; crosses are steps in which it is not finite.",
      partial(_gradient, run),
    )
  for prefix, name, what in (
    ("grad_norm_", "gradient_norms", "Gradient norms by part"),
    ("update_norm_", "update_norms", "Update norms by part"),
  ):
    parts = {
      key: short(key.removeprefix(prefix), 24)
      for key in sorted(run.metrics.values)
      if key.startswith(prefix) and run.metrics.has(key)
    }
    if parts:
      fill = partial(_several, run, parts, what, "norm", log=True, below=True)
      yield draw(name, f"{what} of the model, running means.", fill, high=high_with_legend(parts))


def routing(run: RunData) -> Iterator[Drawn]:
  """The load of experts over the steps, in the worst layer."""
  if run.metrics.has("router_imbalance"):
    yield draw(
      "router_imbalance",
      "Tokens of the busiest expert over the mean of its layer, in the worst layer: 1 is even.",
      partial(_one, run, "router_imbalance", "Busiest expert, worst layer", "load over mean"),
    )


def indexers(run: RunData) -> Iterator[Drawn]:
  """What the indexers learn."""
  if kl := run.metrics.layers("indexer_kl"):
    yield draw(
      "indexer_kl",
      "How far each indexer is from the attention that it imitates; running means.",
      partial(
        _several,
        run,
        {f"indexer_kl_layer_{layer}": f"layer {layer}" for layer in kl},
        "Loss of the indexers",
        "nats a query",
        log=True,
        below=True,
      ),
      high=high_with_legend(kl),
    )


def condition(run: RunData) -> Iterator[Drawn]:
  """What layers report of themselves."""
  for metric, title, unit, caption in _WATCHED:
    if run.metrics.has(metric):
      yield draw(metric, caption, partial(_one, run, metric, title, unit))


def serving(run: RunData) -> Iterator[Drawn]:
  """What replay and the approximations of serving cost on held-out conversations."""
  if run.metrics.has(EXACT):
    yield draw(
      "replay_loss",
      "Loss of held-out answers, exact and as a server with bounded replay computes it.",
      partial(
        _several,
        run,
        {EXACT: "exact", REPLAYED: "replayed"},
        "Held-out answers",
        "nats a token",
      ),
    )
  buckets = {f"_{bucket}": bucket.replace("_", " ") for bucket in BUCKETS}
  for metric, name, title, unit in (
    (GAP, "replay_gap", "Replayed minus exact loss", "nats a token"),
    (KL, "replay_kl", "Divergence of replay", "KL, nats a token"),
  ):
    if run.metrics.has(metric):
      names = {metric: "all"} | {metric + end: label for end, label in buckets.items()}
      caption = f"{title}, also by the token's number in its answer."
      yield draw(name, caption, partial(_several, run, names, title, unit))
  if run.metrics.has(TOP1):
    yield draw(
      "replay_top1",
      "Share of held-out tokens whose likeliest successor is the same with replay.",
      partial(_several, run, {TOP1: "same"}, "Same likeliest token", "share"),
    )
  deltas = {FP4: "FP4 entries", POOL: "candidate pool"}
  if any(map(run.metrics.has, deltas)):
    yield draw(
      "serving_delta",
      "Loss with an approximation of serving, minus loss without it.",
      partial(_several, run, deltas, "What serving adds to the loss", "nats a token"),
    )


def mark(axes: Any, run: RunData, *, label: bool = True) -> None:
  """Restarts and beginnings of stages, in a figure over steps."""
  for number, step in enumerate(dict.fromkeys(run.restarts)):
    text = {"label": "restart"} if label and not number else {}
    axes.axvline(step + 0.5, color=SERIES[1], linestyle="--", linewidth=1, alpha=0.8, **text)
  for step, name in run.borders.items():
    axes.axvline(step + 0.5, color=SOFT, linestyle=":", linewidth=1.4)
    if label:
      axes.annotate(
        short(name, 24),
        (step + 0.5, 1),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        xytext=(3, -9),
        fontsize=8,
      )


def _loss(run: RunData, axes: Any) -> None:
  _raw_and_smooth(axes, run.metrics, "loss", "running mean")
  _crosses(axes, run.metrics, "loss")
  _dress(axes, run, "Training loss", "nats a token")
  _legend(axes)


def _gradient(run: RunData, axes: Any) -> None:
  _raw_and_smooth(axes, run.metrics, "grad_norm", "running mean")
  _crosses(axes, run.metrics, "grad_norm")
  _dress(axes, run, "Gradient norm", "norm")
  _log(axes, run.metrics.get("grad_norm"))
  _legend(axes)


def _validation(run: RunData, axes: Any) -> None:
  _points(axes, run.metrics, MODEL, "model")
  bigram = run.metrics.last(BASELINE)
  if bigram is not None:
    axes.axhline(bigram, color=SERIES[1], linewidth=1.2, label=f"bigram, {bigram:.3f}")
  _dress(axes, run, "Validation", "bits per byte", label=False)
  _legend(axes)


def _rate(run: RunData, axes: Any) -> None:
  axes.plot(*thin(run.metrics.steps_N, run.metrics.get("lr")))
  _dress(axes, run, "Learning rate", "learning rate")
  axes.set_ylim(bottom=0)


def _one(run: RunData, metric: str, title: str, unit: str, axes: Any) -> None:
  _raw_and_smooth(axes, run.metrics, metric, None)
  _dress(axes, run, title, unit, label=False)


def _several(
  run: RunData,
  names: Mapping[str, str],
  title: str,
  unit: str,
  axes: Any,
  *,
  log: bool = False,
  below: bool = False,
  limits: tuple[float, float] | None = None,
) -> None:
  """Lines of some metrics (name -> label); values of a few steps are points."""
  drawn = [name for name in names if run.metrics.has(name)]
  for number, name in enumerate(drawn):
    values_N = run.metrics.get(name)
    style = line_style(number)
    if np.isfinite(values_N).mean() < 0.5:
      _points(axes, run.metrics, name, names[name], linestyle=style)
      continue
    points = thin(run.metrics.steps_N, smooth(values_N))
    axes.plot(*points, label=names[name], linestyle=style, marker="o" if _few(run.metrics) else "")
  _dress(axes, run, title, unit, label=False)
  if limits:
    axes.set_ylim(limits)
  if log:
    _log(axes, *(run.metrics.get(name) for name in drawn))
  _legend(axes, below=below)


def _raw_and_smooth(axes: Any, metrics: Columns, name: str, label: str | None) -> None:
  steps_N, values_N = metrics.steps_N, metrics.get(name)
  raw = {"color": SOFT, "linewidth": 0.8, "alpha": 0.8, "marker": "o" if _few(metrics) else ""}
  axes.plot(*thin(steps_N, values_N), label="each step" if label else None, **raw)
  axes.plot(*thin(steps_N, smooth(values_N)), color=SERIES[0], label=label)


def _points(axes: Any, metrics: Columns, name: str, label: str, **style: Any) -> None:
  """A metric that only some steps have."""
  there_N = np.isfinite(metrics.get(name))
  points = thin(metrics.steps_N[there_N], metrics.get(name)[there_N])
  axes.plot(*points, marker="o", markersize=3, label=label, **style)


def _crosses(axes: Any, metrics: Columns, name: str) -> None:
  """Steps without a finite value, at the lower edge."""
  lost = metrics.steps_N[~np.isfinite(metrics.get(name))]
  if len(lost):
    steps, heights = thin(lost, np.full(len(lost), 0.02))
    style = {"color": SERIES[1], "clip_on": False, "label": "not finite"}
    axes.plot(steps, heights, "x", transform=axes.get_xaxis_transform(), **style)


def _dress(axes: Any, run: RunData, title: str, unit: str, *, label: bool = True) -> None:
  mark(axes, run, label=label)
  axes.set(title=title, xlabel="step", ylabel=unit)
  axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
  axes.xaxis.get_major_locator().set_params(integer=True)


def _log(axes: Any, *columns: np.ndarray) -> None:
  """A logarithmic axis where the values are far enough apart for one to have numbers."""
  positive = np.concatenate([column[column > 0] for column in columns])
  if len(positive) and positive.max() > 10 * positive.min():
    axes.set_yscale("log")


def _legend(axes: Any, *, below: bool = False) -> None:
  handles, _ = axes.get_legend_handles_labels()
  if handles and below:
    axes.figure.legend(loc="outside lower center", ncols=3)
  elif handles:
    axes.legend()


def _few(metrics: Columns) -> bool:
  """A line through so few points would not be seen."""
  return len(metrics.steps_N) < 3
