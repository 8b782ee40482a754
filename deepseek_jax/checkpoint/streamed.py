"""A step that is made while it is written: one array exists at a time, the rest of the tree never.

The step is the same on disk as one that a run saves.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from deepseek_jax.checkpoint import manifest
from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.storage import SAVE_ERRORS, fail_quietly, reason

_CHUNK_BYTES = 2**26  # of what is read together later, at most


@dataclasses.dataclass(frozen=True)
class Unmade:
  """An array that does not exist yet."""

  shape: tuple[int, ...]
  dtype: np.dtype
  make: Callable[[], jax.Array]
  lead: int = 0  # axes at the front whose places are stored apart, to be read one by one

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


class _MakesFirst(ocp.type_handlers.ArrayHandler):
  """Orbax's handler of arrays, which makes an array, writes it and forgets it before the next."""

  async def serialize(
    self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[Any]:
    for value, info, arg in zip(values, infos, args or (), strict=True):
      for written in await super().serialize([value.make()], [info], [arg]):
        written.result()
    return []


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
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(handler_registry=registry)) as writer:
      writer.save(
        folder,
        args=ocp.args.Composite(
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
    (jax.Array, ocp.type_handlers.ArrayHandler(**quiet)), (Unmade, _MakesFirst(**quiet))
  )
