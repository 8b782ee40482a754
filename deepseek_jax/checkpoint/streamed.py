"""A step that is made while it is written: a part of one array exists at a time, the rest never.

The step is the same on disk as one that a run saves.
"""

import asyncio
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future
from orbax.checkpoint._src.serialization import (  # private: see _create
  ocdbt_utils,
  tensorstore_utils,
)

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.storage import SAVE_ERRORS, Items, ItemsArgs, fail_quietly, reason
from deepseek_jax.checkpoint.stored_arrays import chunk_shape

_CHUNK_BYTES = 2**26  # of what is read together later, at most

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Unmade:
  """An array that does not exist yet."""

  shape: tuple[int, ...]
  dtype: np.dtype
  sharding: jax.sharding.Sharding  # of the array that is read later: who writes what
  read: Callable[[Index], np.ndarray]  # makes a part
  lead: int = 0  # axes at the front whose places are made, and stored, one by one
  by_rows: bool = False  # the axis behind them is made in blocks, not whole

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class _MakesParts(ocp.type_handlers.ArrayHandler):
  """Orbax's handler of arrays, which makes a part, writes it and forgets it before the next.

  Small parts are on their way together, for the database of an item is committed with each write.
  """

  async def serialize(
    self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[Any]:
    # Another process may still be making the folder: Orbax says when it is there.
    writing = _write(values, infos, args or ())
    return [future.CommitFutureAwaitingContractedSignals(writing, name="parts")]


async def _write(values: Sequence[Unmade], infos: Sequence[Any], args: Sequence[Any]) -> None:
  await asyncio.gather(*(info.await_path_creation() for info in infos))
  arrays = await asyncio.gather(*map(_create, values, infos, args))
  writes: list[ts.WriteFutures] = []
  size = 0
  try:
    for value, array in zip(values, arrays, strict=True):
      for index in _own_parts(value, chunk_shape(array)):
        part = value.read(index)
        if size + part.nbytes > _CHUNK_BYTES:
          await asyncio.gather(*writes)
          writes, size = [], 0
        writes.append(array[index].write(part, can_reference_source_data_indefinitely=True))
        size += part.nbytes
  finally:  # nothing is written any more behind an error
    ended = await asyncio.gather(*writes, return_exceptions=True)
  for error in ended:
    if isinstance(error, BaseException):
      raise error


async def _create(value: Unmade, info: Any, arg: Any) -> ts.TensorStore:
  """The array on disk, as Orbax (0.12.8) describes those that it writes whole; still empty."""
  spec = tensorstore_utils.build_array_write_spec(
    info,
    arg,
    global_shape=value.shape,
    local_shape=value.sharding.shard_shape(value.shape),
    dtype=value.dtype,
    use_ocdbt=info.is_ocdbt_checkpoint,
    process_index=ocdbt_utils.get_process_index_for_subdir(info.is_ocdbt_checkpoint),
  ).json
  if jax.process_index() == 0:
    await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
  return await ts.open(ts.Spec(spec), open=True, assume_metadata=True, context=info.ts_context)


def _own_parts(value: Unmade, chunk: Sequence[int]) -> Iterator[Index]:
  """Of the shards that no other device has before one of this process."""
  owners: dict[Index, Any] = {}
  for device, index in value.sharding.devices_indices_map(value.shape).items():
    owners.setdefault(index, device)
  for index, device in owners.items():
    if device.process_index == jax.process_index():
      yield from _cut(value, index, chunk)


def _cut(value: Unmade, shard: Index, chunk: Sequence[int]) -> Iterator[Index]:
  """Parts of a shard, each of whole chunks where these do not reach over its edge."""
  ranges = [range(*one.indices(size)) for one, size in zip(shard, value.shape, strict=True)]
  lead, inner = ranges[: value.lead], [slice(r.start, r.stop) for r in ranges[value.lead :]]
  blocks = inner[:1]
  if value.by_rows:
    row = value.dtype.itemsize * math.prod(map(len, ranges[value.lead + 1 :]))
    step = chunk[value.lead] * max(1, _CHUNK_BYTES // (chunk[value.lead] * row))
    every = ranges[value.lead]
    blocks = [slice(at, min(at + step, every.stop)) for at in every[::step]]
  for place in itertools.product(*lead):
    for block in blocks:
      yield (*(slice(at, at + 1) for at in place), block, *inner[1:])


def write_step(folder: pathlib.Path, items: dict[str, Any], documents: dict[str, dict]) -> None:
  """Writes a complete step; every process makes the same call.

  Args:
    folder: must not exist.
    items: item name -> nested dicts of Unmade.
    documents: item name -> JSON-able.

  Raises: CheckpointError if it cannot be written; what there is of it is then left to the caller.
  """
  fail_quietly()
  arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=_registry())
  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  registry.add(None, ocp.args.PyTreeSave, arrays)
  registry.add(None, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
  chunks = lambda item: jax.tree.map(_chunks, item)
  try:
    with ocp.Checkpointer(Items(handler_registry=registry)) as writer:
      writer.save(
        folder,
        args=ItemsArgs(
          **{n: ocp.args.PyTreeSave(item, save_args=chunks(item)) for n, item in items.items()},
          **{n: ocp.args.JsonSave(document) for n, document in documents.items()},
        ),
      )
    if jax.process_index() == 0:
      manifest.write_manifest(folder)
  except SAVE_ERRORS as error:
    raise CheckpointError(f"{folder} cannot be written: {reason(error)}.") from error


def _chunks(leaf: Unmade) -> ocp.SaveArgs:
  return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=tuple(range(leaf.lead)))


def _registry() -> Any:
  # Files about all arrays of an item would be written again with every array.
  quiet: dict[str, Any] = {"enable_write_sharding_file": False, "array_metadata_store": None}
  return ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(**quiet)), (Unmade, _MakesParts(**quiet))
  )
