"""The name map: our parameters and the released tensors that they are made of (model.md section 4).

One row of the table is one kind of tensor. Released matrices are [out, in]; ours are [in, out],
with heads, groups and streams as axes of their own. A `view` gives the axes of a released tensor as
we split them, `|` between those of its rows and those of its columns, in these letters: D width,
V vocabulary, H heads, d head width, r query rank, G output groups, g head channels of a group,
o output rank, Z = G o, I indexer heads, i indexer width, c streams, k = c (c + 2) coefficients,
E experts, F hidden width, N table rows, h channels of a row, W = lookups h, X = (c + 1) D.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from deepseek_jax.config import LayerSpec, ModelConfig

# How the release stores a tensor: E4M3 with a scale per 32 x 32 tile, packed E2M1 with one per 32
# inputs, E4M3 with one per 32 channels of a row, or plain (model.md section 3.6).
Stored = Literal["fp8", "fp4", "fp8_rows", "bf16", "f32"]
# How the axes of a view become ours: as they are, the last one first, the last two exchanged.
Turn = Literal["same", "inputs_first", "exchange"]


class Row(NamedTuple):
  ours: str  # path inside a layer, or in the tree
  released: str  # name behind "layers.N.", or whole; {expert} where ours has an axis of experts
  stored: Stored
  view: str
  turn: Turn = "same"


_ATTENTION = (
  Row("attn/wq_a", "attn.wq_a.weight", "fp8", "r|D", "inputs_first"),
  Row("attn/q_norm", "attn.q_norm.weight", "bf16", "r"),
  Row("attn/wq_b", "attn.wq_b.weight", "fp8", "H d|r", "inputs_first"),
  Row("attn/wkv", "attn.wkv.weight", "fp8", "d|D", "inputs_first"),
  Row("attn/kv_norm", "attn.kv_norm.weight", "bf16", "d"),
  Row("attn/wo_a", "attn.wo_a.weight", "fp8", "G o|g", "exchange"),
  Row("attn/wo_b", "attn.wo_b.weight", "fp8", "D|Z", "inputs_first"),
  Row("attn/sink", "attn.attn_sink", "f32", "H"),
  Row("attn_norm", "attn_norm.weight", "bf16", "D"),
  Row("ffn_norm", "ffn_norm.weight", "bf16", "D"),
)
_HYPER = tuple(
  Row(f"hc_{site}/{part}", f"hc_{site}_{part}", "f32", view)
  for site in ("attn", "ffn")
  for part, view in (("fn", "k|c D"), ("base", "k"), ("scale", "3"))
)
_MOE = (
  Row("moe/gate", "ffn.gate.weight", "bf16", "E|D", "inputs_first"),
  Row("moe/bias", "ffn.gate.bias", "f32", "E"),
  Row("moe/bias_vl", "ffn.gate.bias_vl", "f32", "E"),
  Row("moe/experts/w1", "ffn.experts.{expert}.w1.weight", "fp4", "F|D", "inputs_first"),
  Row("moe/experts/w2", "ffn.experts.{expert}.w2.weight", "fp4", "D|F", "inputs_first"),
  Row("moe/experts/w3", "ffn.experts.{expert}.w3.weight", "fp4", "F|D", "inputs_first"),
  Row("moe/shared/w1", "ffn.shared_experts.w1.weight", "fp8", "F|D", "inputs_first"),
  Row("moe/shared/w2", "ffn.shared_experts.w2.weight", "fp8", "D|F", "inputs_first"),
  Row("moe/shared/w3", "ffn.shared_experts.w3.weight", "fp8", "F|D", "inputs_first"),
)
LAYER = (*_ATTENTION, *_HYPER, *_MOE)
_SOURCE = (
  Row("attn/compressor/wkv", "attn.compressor.wkv.weight", "bf16", "d|D", "inputs_first"),
  Row("attn/compressor/norm", "attn.compressor.norm.weight", "bf16", "d"),
  Row("attn/indexer/wk", "attn.indexer.wk.weight", "bf16", "i|d", "inputs_first"),
  Row("attn/indexer/k_norm", "attn.indexer.k_norm.weight", "bf16", "i"),
)
_PAIRS = (
  Row("attn/compressor/wgate", "attn.compressor.wgate.weight", "bf16", "d|D", "inputs_first"),
)
_CHOOSER = (
  Row("attn/indexer/wq_b", "attn.indexer.wq_b.weight", "fp8", "I i|r", "inputs_first"),
  Row("attn/indexer/weights_proj", "attn.indexer.weights_proj.weight", "bf16", "I|D",
      "inputs_first"),
)  # fmt: skip
_ENGRAM = (
  Row("engram/table", "engram.embed.weight", "fp8_rows", "N|h"),
  Row("engram/wkv", "engram.wkv.weight", "fp8", "X|W", "inputs_first"),
  Row("engram/q_weight", "engram.q_weight", "bf16", "c|D"),
  Row("engram/k_weight", "engram.k_weight", "bf16", "c|D"),
)
_GLOBAL = (
  Row("embed", "embed.weight", "bf16", "V|D"),
  Row("head", "head.weight", "bf16", "V|D"),
  Row("norm", "norm.weight", "bf16", "D"),
)
_BALANCE = ("moe/bias", "moe/bias_vl")  # not trained by gradients: the item "router"


@dataclasses.dataclass(frozen=True)
class ReleasedTensor:
  """A tensor of the release; its scale, if it has one, is not another."""

  name: str
  stored: Stored
  view: tuple[int, ...]
  row_axes: int  # of the view
  turn: Turn

  @property
  def shape(self) -> tuple[int, ...]:
    """As the release counts it: [out, in], or the view where it is no matrix."""
    if self.row_axes == len(self.view):
      return self.view
    return math.prod(self.view[: self.row_axes]), math.prod(self.view[self.row_axes :])

  @property
  def axes(self) -> tuple[int, ...]:
    """Axes of the view in our order."""
    every = tuple(range(len(self.view)))
    if self.turn == "inputs_first":
      return every[-1:] + every[:-1]
    return (*every[:-2], every[-1], every[-2]) if self.turn == "exchange" else every

  @property
  def scale_name(self) -> str:
    return self.name.removesuffix(".weight") + ".scale"


@dataclasses.dataclass(frozen=True)
class Parameter:
  """One leaf of our tree, made of one released tensor for each place of its leading axes."""

  item: Literal["params", "router"]  # of a checkpoint
  path: str  # "layers_2_7/layer_0/attn/wq_a"
  lead: tuple[int, ...]  # repetitions of a group of layers, experts
  tensors: tuple[ReleasedTensor, ...]
  rows: int | None = None  # of a table, with the zero rows at its end

  @property
  def shape(self) -> tuple[int, ...]:
    first = self.tensors[0]
    inner = tuple(first.view[axis] for axis in first.axes)
    return (*self.lead, *((self.rows, *inner[1:]) if self.rows else inner))


def parameters(cfg: ModelConfig) -> tuple[Parameter, ...]:
  """Every leaf of our tree, in the order of layers; groups are as cfg.scan_layers has them."""
  letters = _letters(cfg)
  whole = lambda row: _tensor(row, row.released, letters)
  found = [Parameter("params", row.ours, (), (whole(row),)) for row in _GLOBAL]
  for group in cfg.scan_plan():
    for number, spec in enumerate(group.layers):
      layers = [spec.layer + repeat * len(group.layers) for repeat in range(group.repeat)]
      once = group.repeat == 1
      folder = f"layer_{spec.layer}" if once else f"{group.name}/layer_{number}"
      for row in layer_rows(spec):
        found.append(_parameter(cfg, row, folder, spec, layers, () if once else (group.repeat,)))
  return tuple(found)


def layer_rows(spec: LayerSpec) -> Iterator[Row]:
  """The rows of the table that a layer has."""
  yield from LAYER
  if spec.kind == "full":
    yield from _SOURCE
    yield from _PAIRS if spec.ratio > 1 else ()
  if spec.kind in ("full", "reindex"):
    yield from _CHOOSER
  if spec.engram is not None:
    yield from _ENGRAM


def layer_tensors(
  prefix: str, rows: Iterator[Row] | tuple[Row, ...], cfg: ModelConfig
) -> Iterator[ReleasedTensor]:
  """The tensors of one layer under "layers.N." or another prefix."""
  letters = _letters(cfg)
  for row in rows:
    count = cfg.moe.experts if "{expert}" in row.released else 1
    for expert in range(count):
      yield _tensor(row, prefix + row.released.format(expert=expert), letters)


def _parameter(cfg: ModelConfig, row: Row, folder: str, spec, layers, lead) -> Parameter:
  letters, rows = _letters(cfg), None
  if spec.engram is not None:
    letters["N"] = cfg.engram.table_rows[spec.engram]
    rows = cfg.engram.stored_rows[spec.engram] if row.ours == "engram/table" else None
  experts = range(cfg.moe.experts) if "{expert}" in row.released else (0,)
  names = [
    f"layers.{layer}.{row.released.format(expert=expert)}" for layer in layers for expert in experts
  ]
  return Parameter(
    item="router" if row.ours in _BALANCE else "params",
    path=f"{folder}/{row.ours}",
    lead=(*lead, *((len(experts),) if "{expert}" in row.released else ())),
    tensors=tuple(_tensor(row, name, letters) for name in names),
    rows=rows,
  )


def _tensor(row: Row, name: str, letters: dict[str, int]) -> ReleasedTensor:
  first, _, last = row.view.partition("|")
  size = lambda letter: int(letter) if letter.isdecimal() else letters[letter]
  view = tuple(size(letter) for letter in (*first.split(), *last.split()))
  return ReleasedTensor(name, row.stored, view, len(first.split()), row.turn)


def _letters(cfg: ModelConfig) -> dict[str, int]:
  a, i, e, c = cfg.attention, cfg.indexer, cfg.engram, cfg.streams
  return {
    "D": cfg.dim,
    "V": cfg.vocab,
    "H": a.heads,
    "d": a.head_dim,
    "r": a.q_rank,
    "G": a.o_groups,
    "g": a.heads // a.o_groups * a.head_dim,
    "o": a.o_rank,
    "Z": a.o_groups * a.o_rank,
    "I": i.heads,
    "i": i.head_dim,
    "c": c,
    "k": c * (c + 2),
    "E": cfg.moe.experts,
    "F": cfg.moe.hidden,
    "h": e.head_dim,
    "W": e.lookups * e.head_dim,
    "X": (c + 1) * cfg.dim,
  }
