"""Arrays of a step in an object store: one Zarr 3 array for each leaf, written by TensorStore.

Orbax (0.12.8) writes to local files and, with two more packages, to gs://; for s3:// it has no
driver. Here every process writes the chunks of its own shards, one object each, and reads the
chunks that its shards touch, whatever mesh wrote them. No object is renamed and none is written by
two processes. A chunk carries a CRC-32C, which TensorStore checks whenever it is read.

`<item>/<leaf>/zarr.json` and `<item>/<leaf>/c/...` for arrays, `<name>.json` for documents. Copied
into a local folder a step is read from there as well.
"""

import concurrent.futures
import json
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts

from deepseek_jax.checkpoint import manifest, names
from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.storage_path import RemotePath, StoragePath

CHUNK_BYTES = 2**26  # at most: 16 whole objects are in memory while they are hashed
READERS = 4  # leaves that are read at the same time
METADATA = "zarr.json"
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]


class _Leaf(NamedTuple):
  """What this process writes of one array."""

  name: str  # <item>/<leaf>
  shape: tuple[int, ...]
  dtype: np.dtype
  chunk: tuple[int, ...]
  parts: list[tuple[Any, np.ndarray]]  # index and values of each shard


class RemoteStorage:
  """Asynchronous writer, one save in flight; `wait` does the writing, in whatever thread it is."""

  def __init__(self) -> None:
    self._pending: tuple[RemotePath, list[_Leaf], dict[str, dict]] | None = None

  def start_save(self, path: RemotePath, items: dict, documents: dict[str, dict]) -> None:
    """Copies the arrays off the devices, then returns; they may be donated at once."""
    leaves = [
      (f"{item}/{name}", leaf)
      for item, tree in items.items()
      for name, leaf in names.named_leaves(tree).items()
    ]
    for _, leaf in leaves:
      for shard in _own_shards(leaf):
        shard.data.copy_to_host_async()
    self._pending = path, [_copied(name, leaf) for name, leaf in leaves], documents

  def wait(self) -> None:
    """Returns when the objects of this process are written. Raises whatever stopped it."""
    if self._pending is None:
      return
    (path, leaves, documents), self._pending = self._pending, None
    try:
      stores = [_create(path, leaf) for leaf in leaves]
      writes = [
        store.result()[index].write(part)
        for store, leaf in zip(stores, leaves, strict=True)
        for index, part in leaf.parts
      ]
      for write in writes:
        write.result()
    except ValueError as error:  # what TensorStore makes of every status but OK
      raise path.error(str(error)) from None
    if jax.process_index() == 0:
      for name, document in documents.items():
        (path / f"{name}.json").write_bytes(json.dumps(document).encode())


def wrote(step_folder: StoragePath) -> bool:
  """Whether a step has this form, wherever it lies now.

  Raises: CheckpointError for one in a store that was written to a local folder.
  """
  if not isinstance(step_folder, RemotePath):
    return (step_folder / "meta.json").is_file()
  if (step_folder / "meta" / "metadata").is_file():
    raise CheckpointError(
      f"{step_folder} was written to a local folder and cannot be read in a store; copy it to one."
    )
  return True


def read_document(path: StoragePath, name: str) -> dict:
  """A JSON document of a step."""
  try:
    return json.loads((path / f"{name}.json").read_bytes())
  except (OSError, ValueError) as error:
    raise CheckpointError(f"{path}/{name}.json cannot be read: {error}") from error


def read_items(path: StoragePath, abstract_items: dict[str, Any]) -> dict[str, Any]:
  """State items of a step, onto the shardings given; as storage.read_items."""
  stored = list(manifest.read_manifest(path))
  return {name: _read_item(path, name, tree, stored) for name, tree in abstract_items.items()}


def _read_item(path: StoragePath, item: str, tree: Any, stored: list[str]) -> Any:
  wanted = names.named_leaves(tree)
  ending = f"/{METADATA}"
  present = [
    name.removeprefix(f"{item}/").removesuffix(ending)
    for name in stored
    if name.startswith(f"{item}/") and name.endswith(ending)
  ]
  try:
    opening = {name: open_array(path / item / name) for name in present}
    arrays = {name: opened.result() for name, opened in opening.items()}
    kinds = {
      name: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
      for name, array in arrays.items()
    }
    names.check_same(f"{item} in {path}", kinds, wanted)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
      read = list(pool.map(lambda name: _placed(arrays[name], wanted[name]), wanted))
  except ValueError as error:
    reason = path.error(str(error)).strerror if isinstance(path, RemotePath) else error
    raise CheckpointError(f"{path} cannot be read: {reason}") from error
  return jax.tree.unflatten(jax.tree.structure(tree), read)


def _placed(array: ts.TensorStore, wanted: jax.ShapeDtypeStruct) -> jax.Array:
  """The array on its devices; a part that several of them hold is read once."""
  parts: dict[str, np.ndarray] = {}

  def part(index: Any) -> np.ndarray:
    if str(index) not in parts:
      parts[str(index)] = np.asarray(array[index].read().result())
    return parts[str(index)]

  if wanted.sharding is None:
    return jax.numpy.asarray(part(tuple(slice(None) for _ in wanted.shape)))
  return jax.make_array_from_callback(wanted.shape, wanted.sharding, part)


def _own_shards(leaf: Any) -> list[Any]:
  """Shards that no other process writes, and no other device of this one."""
  return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]


def _copied(name: str, leaf: Any) -> _Leaf:
  shape = leaf.sharding.shard_shape(leaf.shape)
  parts = [(shard.index, np.array(shard.data)) for shard in _own_shards(leaf)]
  return _Leaf(name, leaf.shape, np.dtype(leaf.dtype), _chunk(shape, leaf.dtype.itemsize), parts)


def _chunk(shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  """An even part of a shard with at most CHUNK_BYTES, cut along the first axes; none is empty."""
  chunk = [max(1, size) for size in shard]
  for axis, size in enumerate(chunk):
    most = max(1, CHUNK_BYTES // (itemsize * math.prod(chunk[axis + 1 :])))
    chunk[axis] = next(part for part in range(min(size, most), 0, -1) if size % part == 0)
    if chunk[axis] > 1:
      break
  return tuple(chunk)


def _create(path: RemotePath, leaf: _Leaf) -> ts.Future:
  """Every process opens the array for writing; process 0 writes its description."""
  spec = {
    "driver": "zarr3",
    "store_data_equal_to_fill_value": True,  # otherwise a chunk of zeros is deleted instead
    "metadata": {
      "shape": leaf.shape,
      "data_type": leaf.dtype.name,
      "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.chunk}},
      "codecs": CODECS,
    },
  }
  first = jax.process_index() == 0
  return (path / leaf.name).open_array(
    spec, open=True, create=first or None, assume_metadata=None if first else True
  )


def open_array(path: StoragePath) -> ts.Future:
  """One array of an item, for reading."""
  spec: dict[str, Any] = {"driver": "zarr3"}
  if isinstance(path, RemotePath):
    return path.open_array(spec, open=True, read=True)
  return ts.open(spec | {"kvstore": {"driver": "file", "path": f"{path}/"}}, open=True, read=True)
