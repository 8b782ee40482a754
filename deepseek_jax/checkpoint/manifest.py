"""manifest.json of a step: the size and SHA-256 of every file, written last.

Orbax does not notice a flipped bit in array data (it returns wrong numbers without an error), so a
step counts as complete only with this file, and is used only while its files still match it.
"""

import concurrent.futures
import json
import os
import pathlib
from collections.abc import Sequence

from deepseek_jax.storage_path import (
  REQUESTS,
  RemotePath,
  StoragePath,
  hash_file,
  storage_path,
  write_atomically,
)

NAME = "manifest.json"
FORMAT = 1  # of the manifest
THREADS = 4  # hashing releases the interpreter lock; more threads than disks are no faster

Files = dict[str, dict[str, int | str]]  # name in the folder -> "bytes" and "sha256"


def write_manifest(step_folder: StoragePath, files: Files | None = None) -> None:
  """Writes the manifest as the last file of the folder; hashes all others where `files` is None."""
  if files is None:
    files = hash_files(step_folder, listed_files(step_folder))
  text = json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)
  write_atomically(step_folder / NAME, text.encode())


def has_manifest(step_folder: StoragePath) -> bool:
  """Whether the step was ever completed."""
  return (step_folder / NAME).is_file()


def complete_steps(checkpoints: StoragePath) -> list[int]:
  """Steps with a manifest in a run's checkpoint folder, ascending; [] where there is no folder."""
  if isinstance(checkpoints, RemotePath):
    parts = [name.split("/") for name in checkpoints.names_below()]
    names = [part[0] for part in parts if part[1:] == [NAME]]
  else:
    # Other processes may be here before process 0 has made the folder: glob takes it for empty.
    names = [path.parent.name for path in checkpoints.glob(f"*/{NAME}")]
  return sorted(int(name) for name in names if name.isdecimal())


def read_manifest(step_folder: StoragePath) -> Files:
  """The files that the step is made of. Raises OSError or ValueError for a damaged manifest."""
  try:
    recorded = json.loads((step_folder / NAME).read_text(encoding="utf-8"))
    files = {str(n): {k: v[k] for k in ("bytes", "sha256")} for n, v in recorded["files"].items()}
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(str(error)) from error
  if not files:
    raise ValueError("no files")
  return files


def verify_step(step_folder: str | os.PathLike[str] | StoragePath) -> list[str]:
  """Compares the files of a step with its manifest.

  Returns: one phrase per problem that names the file; empty if every file is as it was written.
  """
  folder = storage_path(step_folder)
  if isinstance(folder, pathlib.Path) and not folder.is_dir():
    return [f"{folder} is not a folder"]
  if not has_manifest(folder):
    return [f"{NAME} is missing"]
  try:
    wanted = read_manifest(folder)
  except (OSError, ValueError):
    return [f"{NAME} is damaged"]
  there = set(listed_files(folder))
  present = sorted(there & set(wanted))
  problems = [f"{name} is missing" for name in sorted(set(wanted) - there)]
  try:
    found = hash_files(folder, present)
  except OSError as error:
    return [*problems, f"{error.filename} cannot be read ({error.strerror})"]
  for name in present:
    if found[name]["bytes"] != wanted[name]["bytes"]:
      problems.append(f"{name} has {found[name]['bytes']} bytes instead of {wanted[name]['bytes']}")
    elif found[name]["sha256"] != wanted[name]["sha256"]:
      problems.append(f"{name} differs from its SHA-256")
  return problems


def listed_files(folder: StoragePath) -> list[str]:
  """Names of the folder's files, the manifest aside, sorted."""
  if isinstance(folder, RemotePath):
    names = folder.names_below()
  else:
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
  return sorted(name for name in names if name != NAME)


def hash_files(folder: StoragePath, names: Sequence[str]) -> Files:
  """Reads the files whole."""
  entry = lambda name: hash_file(folder / name)._asdict()
  threads = THREADS if isinstance(folder, pathlib.Path) else REQUESTS
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    return dict(zip(names, pool.map(entry, names), strict=True))
