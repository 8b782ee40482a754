"""Heat maps: layers over the steps of a run, and what `evaluate` has measured over two axes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from train.reporting.curves import mark
from train.reporting.drawing import Drawn, draw, short
from train.reporting.results import Axis, HeatMap
from train.reporting.run_data import RunData

_COLUMNS = 120  # of a map over steps; more steps share one
_WRITTEN = 120  # cells of a map that have their number written into them
_UNITS = {
  "lengths": "length (tokens)",
  "depths": "depth",
  "layers": "layer",
  "experts": "expert",
}
_COLOURS = "viridis"  # rises evenly in lightness, for readers who see few colours too


def expert_load(run: RunData) -> Iterator[Drawn]:
  """How uneven the load of experts is."""
  if layers := run.metrics.layers("router_imbalance"):
    yield draw(
      "expert_load",
      "Tokens of the busiest expert of a layer, over the mean of its experts: 1 is even.",
      partial(_over_steps, run, layers, "Expert load", "busiest over mean", None),
    )


def selection(run: RunData) -> Iterator[Drawn]:
  """How much of the attention falls on what indexers chose."""
  for metric, title, among in (
    ("recall", "Indexer recall", "the chosen entries"),
    ("pool_recall", "Pool recall", "the candidate pool"),
  ):
    if layers := run.metrics.layers(metric):
      caption = f"Share of the attention on all visible entries that falls on {among}."
      fill = partial(_over_steps, run, layers, title, "share of attention", (0, 1))
      yield draw(metric, caption, fill)


def tables(maps: Sequence[HeatMap]) -> Iterator[Drawn]:
  """What `evaluate` has measured over two axes: one figure for each task, metric and checkpoint."""
  for number, found in enumerate(maps):
    high = min(5.5, max(2.4, 1.2 + 0.24 * len(found.rows.values)))
    caption = f"{found.task}, {found.metric}, {found.source}."
    if found.rows.name == "depths":
      caption += " Depth is where in the text the answer stands, as a share of its length."
    name = f"{number + 1:02}_{found.slug}"
    yield draw(name, caption, partial(_table, found), high=high)


def _over_steps(
  run: RunData,
  layers: dict[int, np.ndarray],
  title: str,
  unit: str,
  limits: tuple[float, float] | None,
  axes: Any,
) -> None:
  """Rows are layers, columns stretches of equally many steps, each the mean of what it has."""
  values_LN, steps_N = np.stack(list(layers.values())), run.metrics.steps_N
  parts = np.array_split(np.arange(len(steps_N)), min(_COLUMNS, len(steps_N)))
  cells = np.stack([_mean(values_LN[:, part]) for part in parts], axis=1)
  first, last = steps_N[0] - 0.5, steps_N[-1] + 0.5
  low, high = limits or (1.0, None)
  image = axes.imshow(
    cells,
    aspect="auto",
    interpolation="none",
    cmap=_COLOURS,
    vmin=low,
    vmax=high,
    extent=(first, last, len(layers) - 0.5, -0.5),
  )
  mark(axes, run, label=False)
  _labels(axes.yaxis, list(layers), at_most=20)
  axes.set(title=title, xlabel="step", ylabel="layer", xlim=(first, last))
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(visible=False)
  axes.figure.colorbar(image, ax=axes, label=unit, pad=0.02)


def _table(found: HeatMap, axes: Any) -> None:
  cells_RC = found.cells_RC
  low, high = (0.0, 1.0) if "accuracy" in found.metric else (None, None)
  image = axes.imshow(
    cells_RC, aspect="auto", interpolation="none", cmap=_COLOURS, vmin=low, vmax=high
  )
  if cells_RC.size <= _WRITTEN:
    for row, column in np.argwhere(np.isfinite(cells_RC)):
      dark = image.norm(cells_RC[row, column]) < 0.6
      axes.text(
        *(column, row, f"{cells_RC[row, column]:.2f}"),
        color="#ffffff" if dark else "#111111",
        **{"ha": "center", "va": "center", "fontsize": 7},
      )
  _labels(axes.xaxis, _words(found.columns), at_most=10)
  _labels(axes.yaxis, _words(found.rows), at_most=16)
  title = f"{found.task}: {found.metric.replace('_', ' ')}, {found.source}"
  axes.set(title=short(title, 46))
  axes.set(xlabel=_UNITS[found.columns.name], ylabel=_UNITS[found.rows.name])
  axes.grid(visible=False)
  axes.figure.colorbar(image, ax=axes, pad=0.02)


def _words(axis: Axis) -> list[str]:
  form = "{:.0%}" if axis.name == "depths" else "{:,.0f}"
  return [form.format(value) for value in axis.values]


def _labels(axis: Any, labels: list[Any], *, at_most: int) -> None:
  """A label for every place, or for every second, third, ..."""
  places = range(0, len(labels), -(-len(labels) // at_most))
  axis.set_ticks(list(places), [str(labels[place]) for place in places])


def _mean(x_LN: np.ndarray) -> np.ndarray:
  """[L], without what is not finite; NaN where nothing is."""
  finite_LN = np.isfinite(x_LN)
  count_L = finite_LN.sum(axis=1)
  total_L = np.where(finite_LN, x_LN, 0.0).sum(axis=1)
  return np.where(count_L > 0, total_L / np.maximum(count_L, 1), np.nan)
