"""The only file that knows Orbax: writes and reads the items of one step.

A step is a folder with one Orbax PyTree item per state item and one JSON item per document.
Orbax writes into `<step>.orbax-checkpoint-tmp` and commits by renaming it.
"""

import asyncio
import logging
import math
import os
import pathlib
import re
from collections.abc import Coroutine, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src import asyncio_utils  # private: see _run_to_the_last_task

from deepseek_jax.checkpoint import names
from deepseek_jax.checkpoint.errors import CheckpointError

PARTIAL_MARK = ".orbax-checkpoint-tmp"  # in the name of a folder that was not committed
PRINTED_AND_RAISED = ("background save thread", "_SignalingThread", "Failed to write metadata")
COMMIT_TIMEOUT = 1200  # seconds until a save that does not end counts as failed
RESTORE_BYTES = 2 * 10**9  # host memory for arrays on their way to devices, unless one is larger
SAVE_ERRORS = (OSError, ValueError, RuntimeError)  # what Orbax and TensorStore raise from a save


class Storage:
  """Asynchronous writer, one save in flight."""

  def __init__(self) -> None:
    fail_quietly()
    handler = Items(handler_registry=_handlers(RESTORE_BYTES))
    self._writer = ocp.AsyncCheckpointer(handler, timeout_secs=COMMIT_TIMEOUT)

  def start_save(self, path: pathlib.Path, items: dict, documents: dict[str, dict]) -> None:
    """Copies the arrays off the devices, then returns; they may be donated at once."""
    arrays = {name: names.to_nested(item) for name, item in items.items() if jax.tree.leaves(item)}
    self._writer.save(
      path,
      args=ItemsArgs(
        **{name: ocp.args.PyTreeSave(item) for name, item in arrays.items()},
        **{name: ocp.args.JsonSave(document) for name, document in documents.items()},
      ),
    )

  def wait(self) -> None:
    """Returns when the save in flight is committed. Raises whatever stopped it, and then nothing
    writes into the step's folder any more.
    """
    self._writer.wait_until_finished()

  def close(self) -> None:
    self._writer.close()


def fail_quietly() -> None:
  """From now on a write that fails in Orbax raises, without tracebacks and writes behind it."""
  logging.getLogger("absl").addFilter(_is_news)
  asyncio_utils.run_sync = _run_to_the_last_task


class _AllOf:
  """An Orbax future that ends after all of several, with the error of the first that failed."""

  def __init__(self, futures: Sequence[Any]) -> None:
    self._futures = futures

  def result(self, timeout: float | None = None) -> None:
    first = None
    for future in self._futures:
      try:
        future.result(timeout=timeout)
      except SAVE_ERRORS as error:
        first = first or error
    if first:
      raise first

  def cancel(self) -> None:
    for future in self._futures:
      future.cancel()


class Items(ocp.CompositeCheckpointHandler):
  """Orbax reports the first item that fails while the others still write; this waits for them."""

  async def async_save(self, *args: Any, **kwargs: Any) -> list[Any]:
    return [_AllOf(await super().async_save(*args, **kwargs) or ())]


@ocp.args.register_with_handler(Items, for_save=True, for_restore=True)
class ItemsArgs(ocp.args.Composite):
  """The arguments of Items; Orbax wants a class for each handler."""


_orbax_run_sync = asyncio_utils.run_sync


def _run_to_the_last_task(coroutine: Coroutine) -> Any:
  """Orbax's run_sync, except that a failed coroutine's event loop closes after its other tasks.

  Orbax (0.12.8, without an option) closes it at the first write that fails. TensorStore goes on
  with the others: each ends in a traceback about the closed loop, and they write while the step's
  folder is being removed.
  """

  async def to_the_last_task() -> Any:
    try:
      return await coroutine
    except BaseException:
      while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
      raise

  return _orbax_run_sync(to_the_last_task())


def read_document(path: pathlib.Path, name: str) -> dict:
  """A JSON item of a step."""
  return _read(path, ocp.args.Composite(**{name: ocp.args.JsonRestore()}), RESTORE_BYTES)[name]


def read_items(path: pathlib.Path, abstract_items: dict[str, Any]) -> dict[str, Any]:
  """State items of a step, onto the shardings given.

  Args:
    path: folder of the step.
    abstract_items: item name -> tree of jax.ShapeDtypeStruct with sharding; a subset will do.

  Raises: CheckpointError if names, shapes or dtypes differ from what is stored.
  """
  wanted = {name: names.named_leaves(item) for name, item in abstract_items.items()}
  limit = RESTORE_BYTES
  for name, leaves in wanted.items():
    stored = names.named_leaves(_stored_arrays(path / name))
    names.check_same(f"{name} in {path}", stored, leaves)
    limit = max([limit, *(2 * _read_bytes(stored[n], leaf) for n, leaf in leaves.items())])
  nested = {n: names.to_nested(item) for n, item in abstract_items.items() if wanted[n]}
  restore = lambda item: ocp.args.PyTreeRestore(
    item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
  )
  found = _read(path, ocp.args.Composite(**{n: restore(v) for n, v in nested.items()}), limit)
  return {
    name: names.from_nested(found[name] if wanted[name] else {}, like)
    for name, like in abstract_items.items()
  }


def _handlers(restore_bytes: int) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  tree = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=math.ceil(restore_bytes / 10**9))
  document = ocp.JsonCheckpointHandler()
  registry.add(None, ocp.args.PyTreeSave, tree)
  registry.add(None, ocp.args.PyTreeRestore, tree)
  registry.add(None, ocp.args.JsonSave, document)
  registry.add(None, ocp.args.JsonRestore, document)
  return registry


def _read(path: pathlib.Path, args: ocp.args.Composite, limit: int) -> Any:
  handler = ocp.CompositeCheckpointHandler(handler_registry=_handlers(limit))
  with ocp.Checkpointer(handler) as reader:
    try:
      return reader.restore(path, args=args)
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error


def _stored_arrays(item_path: pathlib.Path) -> dict:
  """Shape, dtype and chunks of what is stored; empty if the item has no leaves."""
  if not item_path.is_dir():
    return {}
  return ocp.PyTreeCheckpointHandler().metadata(epath.Path(item_path)).tree


def _read_bytes(stored: Any, wanted: jax.ShapeDtypeStruct) -> int:
  """Upper bound of what Orbax reserves for one device's part: whole chunks that touch it."""
  part = wanted.sharding.shard_shape(wanted.shape) if wanted.sharding else wanted.shape
  chunks = stored.storage.chunk_shape if stored.storage else stored.shape
  touched = [
    min(-(-size // max(1, chunk)) * chunk, local + 2 * chunk)
    for size, local, chunk in zip(stored.shape, part, chunks, strict=True)
  ]
  return math.prod(touched) * np.dtype(stored.dtype).itemsize


def reason(error: BaseException) -> str:
  """What stopped a save or a read, short enough for a sentence."""
  text = str(error).strip() or type(error).__name__
  if code := re.search(r"os_error_code='(\d+)'", text):  # how TensorStore reports errno
    return os.strerror(int(code[1]))
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  return text.splitlines()[0][:200]


def size_text(count: float) -> str:
  """A number of bytes for a sentence."""
  for unit in ("bytes", "kB", "MB", "GB"):
    if count < 1000:
      return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
    count /= 1000
  return f"{count:.1f} TB"


def _is_news(record: logging.LogRecord) -> bool:
  """False for the tracebacks that Orbax prints from its threads and then raises anyway."""
  text = str(record.msg)
  return not any(part in text for part in PRINTED_AND_RAISED)
