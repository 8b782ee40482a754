"""Which parameter the optimizer treats how, by its role: its name inside a layer.

Nothing is left to a rule on shapes: stacked biases look like matrices.
"""

import enum
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from optax.contrib import MuonDimensionNumbers

from deepseek_jax.config import EngramConfig
from deepseek_jax.training_config import OptimConfig


class Group(enum.Enum):
  """Parameters that are treated alike. Source: model.md section 6.2."""

  MATRIX = "matrix"  # Muon on each logical matrix, weight decay
  EMBEDDING = "embedding"  # Sinkhorn-balanced momentum, no decay
  TABLE = "table"  # the same with a higher learning rate: Engram tables
  GAIN = "gain"  # AdamW, weight decay: gains of norms
  PLAIN = "plain"  # AdamW, no decay: biases, scales, sinks, factors of low rank


# Axes of the stored array from its end, so that the axis of repeated layers, in front, changes
# nothing. Axes that are neither of the rows (out) nor of the columns (in) of a logical matrix count
# matrices: heads, output groups, experts, layers.
_IN_OUT = MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
_PER_HEAD = MuonDimensionNumbers(reduction_axis=-3, output_axis=-1)  # stored [in, head, out]
# Stored [out, stream, in]. The order of columns is free; the last axis is the one that devices cut.
_STREAMS_IN = MuonDimensionNumbers(reduction_axis=(-1, -2), output_axis=-3)

# The report leaves open whether an output group of wo_a is a matrix of its own (here it is), and
# whether the rest of an Engram has its table's learning rate (here it has not).
_MATRICES = {
  "attn/wq_a": _IN_OUT,
  "attn/wq_b": _PER_HEAD,
  "attn/wkv": _IN_OUT,
  "attn/wo_a": _IN_OUT,
  "attn/wo_b": _IN_OUT,
  "attn/compressor/wkv": _IN_OUT,
  "attn/compressor/wgate": _IN_OUT,
  "attn/indexer/wq_b": _PER_HEAD,
  "attn/indexer/weights_proj": _IN_OUT,
  "attn/indexer/wk": _IN_OUT,
  "hc_attn/fn": _STREAMS_IN,
  "hc_ffn/fn": _STREAMS_IN,
  "moe/gate": _IN_OUT,
  "moe/experts/w1": _IN_OUT,
  "moe/experts/w2": _IN_OUT,
  "moe/experts/w3": _IN_OUT,
  "moe/shared/w1": _IN_OUT,
  "moe/shared/w2": _IN_OUT,
  "moe/shared/w3": _IN_OUT,
  "engram/wkv": _IN_OUT,
}
# Projections of attention and of experts, whose changes may have a low rank (low_rank.py), and what
# their factors stand under.
ADAPTABLE = tuple(k for k in _MATRICES if k.startswith(("attn/w", "moe/experts/", "moe/shared/")))
LOW_RANK = "low_rank"
_FACTORS = tuple(f"{LOW_RANK}/{key}/{factor}" for key in ADAPTABLE for factor in ("a", "b"))
_ROWS = {"embed": Group.EMBEDDING, "head": Group.EMBEDDING, "engram/table": Group.TABLE}
_GAINS = (
  "norm",
  "attn_norm",
  "ffn_norm",
  "attn/q_norm",
  "attn/kv_norm",
  "attn/compressor/norm",
  "attn/indexer/k_norm",
  "engram/q_weight",
  "engram/k_weight",
)
_PLAIN = ("attn/sink", "hc_attn/base", "hc_attn/scale", "hc_ffn/base", "hc_ffn/scale", *_FACTORS)
_GROUP = (
  dict.fromkeys(_MATRICES, Group.MATRIX)
  | _ROWS
  | dict.fromkeys(_GAINS, Group.GAIN)
  | dict.fromkeys(_PLAIN, Group.PLAIN)
)


class Row(NamedTuple):
  """What happens to one parameter."""

  name: str
  role: str  # the name without its layer
  shape: tuple[int, ...]
  rule: str  # "Muon", "Sinkhorn" or "AdamW"
  count: int  # logical matrices in it; 0 where the rule knows none
  matrix: tuple[int, int] | None  # (out, in) of each
  lr: float  # factor on the learning rate
  decay: float  # weight decay


def groups(params: dict) -> dict:
  """A tree like params with the Group of each parameter.

  Raises: ValueError that names every parameter without a group.
  """
  unassigned = [name(path) for path, _ in jax.tree.leaves_with_path(params) if _unknown(path)]
  if unassigned:
    raise ValueError(f"no optimizer group is known for the parameters {unassigned}.")
  return jax.tree.map_with_path(lambda path, _: _GROUP[role(path)], params)


def logical_matrix(path: tuple[Any, ...]) -> MuonDimensionNumbers:
  """Which axes of a parameter of Group.MATRIX are columns (in) and rows (out) of its matrices."""
  return _MATRICES[role(path)]


def stored_along(path: tuple[Any, ...]) -> str | None:
  """Logical axis, as deepseek_jax/nn declares it, that counts the matrices in an array."""
  key = role(path)
  if key.startswith("moe/experts/"):
    return "experts"
  return "heads" if _MATRICES[key] is _PER_HEAD or key == "attn/wo_a" else None


def counted_rows(path: tuple[Any, ...], shape: tuple[int, ...], engram: EngramConfig) -> int:
  """Rows of an embedding or a table that exist; the rest are zeros that let devices share it.

  Both are stored as the logical matrix, [rows, channels].
  """
  if _GROUP[role(path)] is not Group.TABLE:
    return shape[0]
  layer = int(_keys(path)[0].removeprefix("layer_"))  # no two layers of a repetition have a table
  return engram.table_rows[engram.layers.index(layer)]


def rows(params: dict, cfg: OptimConfig, engram: EngramConfig) -> list[Row]:
  """One row for each parameter.

  Args:
    params: arrays or their shapes.
    cfg: which rules.
    engram: how many rows of each table exist.

  Raises: ValueError that names every parameter without a group.
  """

  def row(path: tuple[Any, ...], group: Group, shape: tuple[int, ...]) -> Row:
    matrix = None
    if rule(group, cfg) == "Muon":
      matrix = matrix_shape(logical_matrix(path), shape)
    elif rule(group, cfg) == "Sinkhorn":
      matrix = counted_rows(path, shape, engram), shape[1]
    count = math.prod(shape) // math.prod(matrix) if matrix else 0
    of_group = rule(group, cfg), count, matrix, *factors(group, cfg)
    return Row(name(path), role(path), shape, *of_group)

  leaves = jax.tree.leaves_with_path(params)
  assigned = jax.tree.leaves(groups(params))
  return [row(path, group, x.shape) for (path, x), group in zip(leaves, assigned, strict=True)]


def table(rows: list[Row]) -> list[tuple[str, ...]]:
  """The rows as words, those of a role with equal matrices as one, under a row of headings.

  Matrices are counted over layers, heads, groups and experts.
  """
  together: dict[tuple, list[Row]] = {}
  for row in rows:
    together.setdefault((row.role, row.matrix, row.rule, row.lr, row.decay), []).append(row)

  def words(alike: list[Row]) -> tuple[str, ...]:
    row, total = alike[0], sum(math.prod(row.shape) for row in alike)
    count = sum(row.count for row in alike)
    matrices = f"{count:,} x [{row.matrix[0]}, {row.matrix[1]}]" if row.matrix else ""
    return row.role, f"{total:,}", row.rule, matrices, f"{row.lr:g}", f"{row.decay:g}"

  heading = ("parameter", "values", "rule", "matrices [out, in]", "lr x", "decay")
  return [heading, *sorted(words(alike) for alike in together.values())]


def matrix_shape(axes: MuonDimensionNumbers, shape: tuple[int, ...]) -> tuple[int, int]:
  """(out, in) of each logical matrix in an array of this shape."""
  size = lambda of: math.prod(shape[axis] for axis in ((of,) if isinstance(of, int) else of))
  return size(axes.output_axis), size(axes.reduction_axis)


def rule(group: Group, cfg: OptimConfig) -> str:
  """The algorithm by which a group moves."""
  if cfg.matrices == "adamw" or group in (Group.GAIN, Group.PLAIN):
    return "AdamW"
  return "Muon" if group is Group.MATRIX else "Sinkhorn"


def factors(group: Group, cfg: OptimConfig) -> tuple[float, float]:
  """Factor on the learning rate, and weight decay."""
  decays = group in (Group.MATRIX, Group.GAIN)
  return cfg.table_lr if group is Group.TABLE else 1.0, cfg.weight_decay if decays else 0.0


def fixed_rules() -> dict[str, str]:
  """What the code, not the configuration, has each role treated as."""
  return {key: _treated_as(key) for key in sorted(_GROUP)}


def changed_rules(stored: Mapping[str, str]) -> list[str]:
  """One sentence for each role that `stored`, once returned by `fixed_rules`, has otherwise.

  Roles that only one of the two knows have no common state; a checkpoint tells them apart.
  """
  now = fixed_rules()
  return [
    f"The optimizer treated {key} as {old} and would now treat it as {now[key]}."
    for key, old in stored.items()
    if key in now and now[key] != old
  ]


def name(path: tuple[Any, ...]) -> str:
  return "/".join(_keys(path))


def role(path: tuple[Any, ...]) -> str:
  """The path without the keys that say which layer it is."""
  return role_of(name(path))


def role_of(name: str) -> str:
  """The role in the name of a parameter."""
  return "/".join(key for key in name.split("/") if not key.startswith(("layer_", "layers_")))


def _keys(path: tuple[Any, ...]) -> list[str]:
  return [jax.tree_util.keystr((key,), simple=True) for key in path]


def _unknown(path: tuple[Any, ...]) -> bool:
  return role(path) not in _GROUP


def _treated_as(key: str) -> str:
  if _GROUP[key] is not Group.MATRIX:
    return _GROUP[key].value
  axes = _MATRICES[key]
  return f"matrix with rows {axes.output_axis} and columns {axes.reduction_axis}"
