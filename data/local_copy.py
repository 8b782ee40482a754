"""Files of a prepared folder on this machine: where they lie, or copies of those in a store.

ArrayRecord reads local files only. Copies are named by their SHA-256 in `data` below the cache
folder, which `DEEPSEEK_JAX_CACHE` names: the same file is fetched once, whatever its folder is
called, and a half-fetched one never bears the name.
"""

import concurrent.futures
import hashlib
import os
import pathlib
import uuid
from collections.abc import Sequence

from data.errors import DataError
from data.prepare.progress import phase
from deepseek_jax.storage_path import RemotePath, StoragePath, cache_folder

FETCHED_AT_ONCE = 4  # shards, each of which is whole in memory for a moment


def local_copies(folder: StoragePath, files: Sequence[tuple[str, str]]) -> list[pathlib.Path]:
  """Local paths of files that are given as (name, SHA-256), fetched where they are not there yet.

  Raises: DataError for a file that is missing or another one, OSError if it cannot be fetched.
  """
  if isinstance(folder, pathlib.Path):
    return [folder / name for name, _ in files]
  cache = cache_folder() / "data"
  copies = [cache / sha256 for _, sha256 in files]
  missing = [
    (folder / name, sha256, copy)
    for (name, sha256), copy in zip(files, copies, strict=True)
    if not copy.exists()
  ]
  if missing:
    cache.mkdir(parents=True, exist_ok=True)
    with (
      phase(f"fetching {len(missing)} files of {folder} into {cache}", len(missing)) as advance,
      concurrent.futures.ThreadPoolExecutor(FETCHED_AT_ONCE) as pool,
    ):
      for _ in pool.map(lambda wanted: _fetch(*wanted), missing):
        advance(1)
  return copies


def _fetch(path: RemotePath, sha256: str, copy: pathlib.Path) -> None:
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    raise DataError(f"{path} is missing; prepare its folder again.") from None
  if hashlib.sha256(data).hexdigest() != sha256:
    raise DataError(f"{path} is not the file that was prepared; prepare its folder again.")
  partial = copy.with_name(f"{copy.name}.{uuid.uuid4().hex}")
  try:
    partial.write_bytes(data)
    os.replace(partial, copy)
  finally:
    partial.unlink(missing_ok=True)
