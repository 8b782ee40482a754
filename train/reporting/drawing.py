"""From a figure to a picture file and to SVG that takes its colours from the page around it."""

import contextlib
import importlib
import importlib.util
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

import numpy as np

INK, SOFT = "#1c2430", "#8a94a3"  # text and axes; grid, marks and raw values behind a smoothed line
# Distinct for readers who see few colours, after Okabe and Ito; the page has its own for dark.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7a5195", "#666666")
WIDE, HIGH = 4.6, 3.0  # inches: text stays readable when a phone shows it
_DPI = 170  # of the picture files
_SMALL = 1e-3  # an axis below it would have a power of ten beside its title
_POINTS = 600  # that a line has at most
_STYLE = {
  "svg.fonttype": "none",  # text stays text: small, and it can be searched
  "svg.hashsalt": "report",  # the same run gives the same page
  "text.parse_math": False,  # names from files may hold dollars
  "font.family": "DejaVu Sans",
  "font.size": 9.5,
  "axes.titlesize": 10.5,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": SOFT,
  "grid.alpha": 0.25,
  "legend.frameon": False,
  "legend.fontsize": 8,
  "lines.linewidth": 1.6,
  **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
  **{f"axes.{part}color": INK for part in ("edge", "label", "title")},
}


class Drawn(NamedTuple):
  name: str  # of the picture file, without its end
  caption: str
  svg: str
  png: bytes


def problem() -> str | None:
  """Why nothing can be drawn, in a sentence; None if it can."""
  if importlib.util.find_spec("matplotlib") is not None:
    return None
  return "report draws with matplotlib, which is not installed; `pip install '.[plots]'` does it."


@contextlib.contextmanager
def style() -> Iterator[None]:
  """Figures that are made and drawn inside look alike."""
  matplotlib = importlib.import_module("matplotlib")
  cycler = importlib.import_module("cycler").cycler
  with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=SERIES)}):
    yield


def draw(
  name: str,
  caption: str,
  fill: Callable[[Any], None],
  *,
  high: float = HIGH,
) -> Drawn:
  """A figure whose axes `fill` draws into."""
  figure = importlib.import_module("matplotlib.figure").Figure((WIDE, high), layout="constrained")
  axes = figure.subplots()
  fill(axes)
  for axis in (axes.xaxis, axes.yaxis):
    if axis.get_scale() == "log" or np.abs(axis.get_view_interval()).max() < _SMALL:
      _plain_ticks(axis)
  picture, text = io.BytesIO(), io.StringIO()
  with warnings.catch_warnings():
    # A name in letters that the font lacks is boxes in the picture, and right on the page.
    warnings.filterwarnings("ignore", "Glyph .* missing from font")
    figure.savefig(picture, format="png", dpi=_DPI)
    figure.set_layout_engine("none")  # everything is in its place now
    figure.savefig(
      text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format"))
    )
  return Drawn(name, caption, inline_svg(text.getvalue(), name), picture.getvalue())


def _plain_ticks(axis: Any) -> None:
  """Numbers without powers, which need a mathematical font; on a logarithmic axis 2, 3 and 5
  times a power only where it has few powers.
  """
  if axis.get_scale() == "log" and axis.get_transform().base == 2:
    axis.set_major_formatter(lambda count, _: in_binary(count))
    return

  def between(number: float, _: Any) -> str:
    low, high = axis.get_view_interval()
    return f"{number:g}" if high < 20 * low and f"{number:e}"[0] in "235" else ""

  axis.set_major_formatter(lambda number, _: f"{number:.6g}")
  axis.set_minor_formatter(between)


def in_binary(count: float) -> str:
  """4096 -> 4K."""
  for unit, size in (("M", 2**20), ("K", 2**10)):
    if count >= size:
      return f"{count / size:g}{unit}"
  return f"{count:g}"


def inline_svg(text: str, name: str) -> str:
  """A file of SVG as an element of a page: without header and size, with ids of its own, and with
  the page's colours for ours.
  """
  text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
  head, _, body = text.partition(">")
  view = re.search(r'viewBox="[-\d. ]+"', head)
  assert view  # every figure has a size
  body = re.sub(r'\bid="', f'id="{name}-', body)
  body = body.replace("xlink:href", "href")
  body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
  for colour, on_page in colours().items():
    body = body.replace(colour, f"var({on_page})")
  return f'<svg {view[0]} role="img" aria-labelledby="{name}-caption">{body}'


def colours() -> dict[str, str]:
  """Our colours, and the names that the page has for them."""
  named = {colour: f"--series-{number}" for number, colour in enumerate(SERIES)}
  return {INK: "--ink", SOFT: "--soft"} | named


def high_with_legend(labels: Sized) -> float:
  """Inches of a figure with a legend of three columns below it."""
  return HIGH - 0.1 + 0.17 * -(-len(labels) // 3)


def line_style(number: int) -> str:
  """Of the lines of a figure, so that those that share a colour differ."""
  return ("-", "--", ":")[number // len(SERIES) % 3]


def short(text: str, at_most: int) -> str:
  """As much of a text from a file as a figure has room for, in letters that can be drawn."""
  letters = "".join(letter if letter.isprintable() else "?" for letter in text)
  return letters if len(letters) <= at_most else letters[: at_most - 1] + "…"


def thin(x_N: np.ndarray, y_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """At most _POINTS of the points: of each stretch the lowest and the highest, so that no spike is
  lost. Points that are not finite stay gaps if their whole stretch is.
  """
  if len(x_N) <= _POINTS:
    return x_N, y_N
  kept = []
  for part in np.array_split(np.arange(len(x_N)), _POINTS // 2):
    finite = part[np.isfinite(y_N[part])]
    kept += [part[0]] if not len(finite) else [finite[y_N[finite].argmin()]]
    kept += [finite[y_N[finite].argmax()]] if len(finite) else []
  places = np.unique(kept)
  return x_N[places], y_N[places]


def smooth(y_N: np.ndarray) -> np.ndarray:
  """Mean over the twentieth part of the points around each; what is not finite does not count."""
  width = max(1, len(y_N) // 20) | 1
  finite_N = np.isfinite(y_N)
  ones = np.ones(width)
  total_N = _same(np.where(finite_N, y_N, 0.0), ones)
  count_N = _same(finite_N.astype(float), ones)
  return np.where(finite_N, total_N / np.maximum(count_N, 1), np.nan)


def _same(x_N: np.ndarray, ones: np.ndarray) -> np.ndarray:
  """Running sums, as long as x_N, also where it is shorter than the window."""
  half = len(ones) // 2
  sums = np.cumsum(np.pad(x_N, (half + 1, half)))
  return sums[len(ones) :] - sums[: -len(ones)]
