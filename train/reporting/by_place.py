"""What `evaluate` has measured by place in a text: a line for each task and checkpoint."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from train.reporting.drawing import Drawn, draw, high_with_legend, line_style, short
from train.reporting.results import Curve

_PLACES = {
  "distance": "tokens since the border that serving makes",
  "position": "position in the document",
}
_UNITS = {"kl": "nats a token", "loss_gap": "nats a token", "top1": "share of tokens"}


def by_place(curves: Sequence[Curve]) -> Iterator[Drawn]:
  """One figure for each metric and kind of place."""
  kinds = dict.fromkeys((curve.metric, curve.along) for curve in curves)
  for number, (metric, along) in enumerate(kinds):
    chosen = [curve for curve in curves if (curve.metric, curve.along) == (metric, along)]
    caption = f"{metric} by {_PLACES[along]}; a stretch goes from its number to the next."
    fill = partial(_draw, metric, along, chosen)
    yield draw(f"by_{along}_{number + 1}", caption, fill, high=high_with_legend(chosen))


def _draw(metric: str, along: str, curves: Sequence[Curve], axes: Any) -> None:
  starts = sorted({start for curve in curves for start in curve.starts_K})
  sources = {curve.source for curve in curves}
  for number, curve in enumerate(curves):
    label = curve.task if len(sources) == 1 else f"{curve.task}, {curve.source}"
    places = [starts.index(start) for start in curve.starts_K]
    style = {"marker": "o", "markersize": 3, "linestyle": line_style(number)}
    axes.plot(places, curve.values_K, label=short(label, 24), **style)
  shown = range(0, len(starts), -(-len(starts) // 10))
  axes.set_xticks(list(shown), [f"{starts[place]:g}" for place in shown])
  axes.set(title=short(f"{metric.replace('_', ' ')} by {along}", 46), xlabel=_PLACES[along])
  axes.set_ylabel(_UNITS.get(metric, ""))
  if axes.get_legend_handles_labels()[0]:
    axes.figure.legend(loc="outside lower center", ncols=3)
