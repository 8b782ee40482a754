"""The batches of a run: their shape, the pipelines that give them, their way onto the devices.

Legend: B rows of a step over all processes, R rows that a process reads.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Settings
from data.pipeline import Pipeline, ValidationPass, open_pipeline, open_validation
from data.replay import Place, RowLayouts
from data.source import Row
from deepseek_jax.config import EngramConfig
from deepseek_jax.layout import Layout
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sharding import batch_sharding


@dataclasses.dataclass(frozen=True)
class RowGroup:
  """Processes whose devices hold the same rows; each of them reads all of those rows."""

  index: int  # of this process's group
  count: int  # of groups
  rows: np.ndarray  # [R] where the group's rows stand in the batch, ascending


def row_group(settings: Settings, mesh: Mesh) -> RowGroup:
  """The rows that this process reads.

  Raises: ValueError if processes share some of their rows and not all, or have different counts.
  """
  shape = (settings.data.batch_rows, settings.data.slots)
  held: dict[int, set[int]] = {}  # process -> rows
  for device, (rows, _) in batch_sharding(mesh).devices_indices_map(shape).items():
    held.setdefault(device.process_index, set()).update(range(*rows.indices(shape[0])))
  groups = sorted({tuple(sorted(rows)) for rows in held.values()})
  if sum(map(len, groups)) != shape[0] or len({len(group) for group in groups}) > 1:
    devices = mesh.size // len(held)
    raise ValueError(
      f"mesh.context * mesh.tensor is {mesh.shape['context'] * mesh.shape['tensor']} and a process "
      f"has {devices} devices, so that processes share some of their rows and not all; one of the "
      "two numbers must divide the other."
    )
  own = tuple(sorted(held[jax.process_index()]))
  return RowGroup(groups.index(own), len(groups), np.asarray(own))


def open_training(settings: Settings, group: RowGroup, begin: Sequence[int] = ()) -> Pipeline:
  """The training batches of a group; `begin` and errors as open_pipeline has them."""
  return open_pipeline(
    settings.data,
    ratios=settings.model.ratios,
    engram=_engram(settings),
    host=group.index,
    hosts=group.count,
    window=settings.model.attention.window,
    begin=begin,
  )


def open_held_out(settings: Settings, group: RowGroup, *, replayed: bool = False) -> ValidationPass:
  """The validation batches of a group, exact or replayed. Errors as open_validation has them."""
  return open_validation(
    settings.data,
    ratios=settings.model.ratios,
    engram=_engram(settings),
    host=group.index,
    hosts=group.count,
    window=settings.model.attention.window,
    replayed=replayed,
  )


def empty_row(settings: Settings, *, replayed: bool = False) -> Layout:
  """A batch of one row of padding, in the shape of the steps with or without replay."""
  engram, model = _engram(settings), settings.model
  hashing = None if engram is None else NgramHash(engram, np.zeros(0, np.int32))
  layouts = RowLayouts(settings.data, model.ratios, hashing, model.attention.window)
  row = Row("", [])
  return layouts.replayed(row, Place(0, 0, 0)) if replayed else layouts.exact(row)


def abstract_batch(settings: Settings, mesh: Mesh, *, replayed: bool = False) -> Layout:
  """Shapes and shardings of a whole batch."""
  rows, sharding = settings.data.batch_rows, batch_sharding(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=sharding),
    empty_row(settings, replayed=replayed),
  )


def placer(mesh: Mesh, group: RowGroup) -> Callable[[Any], Any]:
  """Puts a tree of arrays [R, ...], of the rows that this process has read, onto its devices, as
  their part of the batch.
  """
  sharding = batch_sharding(mesh)
  local = np.full(len(group.rows) * group.count, -1)  # [B] number of a row in what was read
  local[group.rows] = np.arange(len(group.rows))

  def put(x: np.ndarray) -> jax.Array:
    def piece(index: Any) -> np.ndarray:
      rows, *rest = index  # a slice for each axis
      first, stop = local[rows][[0, -1]] + (0, 1)  # a piece's rows are neighbours in both
      return x[(slice(first, stop), *rest)]

    return jax.make_array_from_callback((len(local), *x.shape[1:]), sharding, piece)

  return lambda tree: jax.tree.map(put, tree)


def _engram(settings: Settings) -> EngramConfig | None:
  """None for a model without tables."""
  return settings.model.engram if settings.model.engram.layers else None
