"""The arrays of a step of ours as they lie on disk: described without being read, read in parts."""

import pathlib
from typing import Any

import tensorstore as ts

from deepseek_jax.checkpoint import remote_storage
from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.manifest import read_manifest
from deepseek_jax.storage_path import RETRIES, StoragePath

_CACHE_BYTES = 2**28  # of chunks that were read, shared by the arrays of an item
_ARRAY = "/.zarray"  # ends the key of an array's description


def open_items(step_folder: StoragePath) -> dict[str, dict[str, ts.TensorStore]]:
  """Arrays by item and leaf name ("params", "layer_0/attn/wq_a"); none of them is read.

  Raises: CheckpointError for a folder that holds no step.
  """
  try:
    if remote_storage.wrote(step_folder):
      return _open_zarr(step_folder)
    assert isinstance(step_folder, pathlib.Path)  # stores have no other form
    items = [path for path in step_folder.iterdir() if (path / "manifest.ocdbt").is_file()]
    return {path.name: _open_local(path.as_posix()) for path in sorted(items)}
  except (ValueError, OSError) as error:
    raise CheckpointError(f"{step_folder} cannot be read: {error}") from error


def chunk_shape(array: ts.TensorStore) -> tuple[int, ...]:
  """What is read together."""
  return tuple(int(size or 1) for size in array.chunk_layout.read_chunk.shape or array.shape)


def with_cache(array: ts.TensorStore, cache_bytes: int) -> ts.TensorStore:
  """The array with so much room for chunks that several parts share, for itself alone."""
  spec = array.spec().to_json()  # without the context that it was opened in
  return ts.open(spec, open=True, read=True, context=_context(cache_bytes)).result()


def _open_local(item: str) -> dict[str, ts.TensorStore]:
  """Orbax keeps an item in one OCDBT database; a leaf's name has dots in its key."""
  database = {"driver": "ocdbt", "base": f"file://{item}/"}
  keys = [key.decode() for key in ts.KvStore.open(database).result().list().result()]
  names = sorted(key.removesuffix(_ARRAY) for key in keys if key.endswith(_ARRAY))
  context = _context(_CACHE_BYTES)
  opening = {name: _open(database, name, context) for name in names}
  return {name.replace(".", "/"): opened.result() for name, opened in opening.items()}


def _open(database: dict[str, Any], name: str, context: ts.Context) -> ts.Future:
  spec = {
    "driver": "zarr",
    "kvstore": database | {"path": f"{name}/"},
    "recheck_cached_data": "open",
  }
  return ts.open(spec, open=True, read=True, context=context)


def _context(cache_bytes: int) -> ts.Context:
  retries = {"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES}
  return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}, **retries})


def _open_zarr(step_folder: StoragePath) -> dict[str, dict[str, ts.TensorStore]]:
  ending = f"/{remote_storage.METADATA}"
  items: dict[str, dict[str, Any]] = {}
  for file in read_manifest(step_folder):
    if file.endswith(ending):
      item, _, name = file.removesuffix(ending).partition("/")
      items.setdefault(item, {})[name] = remote_storage.open_array(step_folder / item / name)
  return {
    item: {name: opened.result() for name, opened in arrays.items()}
    for item, arrays in items.items()
  }
