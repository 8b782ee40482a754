"""`manifest.json` of a step: the size and SHA-256 of every file, written last.

Orbax does not notice a flipped bit in array data (it returns wrong numbers without an error), so a
step counts as complete only with this file, and is used only while its files still match it.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib

NAME = "manifest.json"
FORMAT = 1  # of the manifest
THREADS = 4  # hashing releases the interpreter lock; more threads than disks are no faster


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Replaces a file by `text` so that a crash leaves the old content or the new one."""
  partial = path.with_name(f"{path.name}.tmp")
  with open(partial, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)
  _sync_folder(path.parent)


def write_manifest(step_folder: pathlib.Path) -> None:
  """Hashes every file below the folder, then writes the manifest as the last one."""
  files = _hash_files(step_folder, _listed_files(step_folder))
  write_atomically(
    step_folder / NAME, json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True)
  )


def has_manifest(step_folder: pathlib.Path) -> bool:
  """Whether the step was ever completed."""
  return (step_folder / NAME).is_file()


def verify_step(step_folder: str | os.PathLike[str]) -> list[str]:
  """Compares the files of a step with its manifest.

  Returns: one phrase per problem that names the file; empty if every file is as it was written.
  """
  folder = pathlib.Path(step_folder)
  if not folder.is_dir():
    return [f"{folder} is not a folder"]
  if not has_manifest(folder):
    return [f"{NAME} is missing"]
  try:
    recorded = json.loads((folder / NAME).read_text(encoding="utf-8"))
    wanted = {str(name): (v["bytes"], v["sha256"]) for name, v in recorded["files"].items()}
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    return [f"{NAME} is damaged"]
  if not wanted:
    return [f"{NAME} is damaged"]
  problems = [f"{name} is missing" for name in sorted(wanted) if not (folder / name).is_file()]
  present = [name for name in sorted(wanted) if (folder / name).is_file()]
  try:
    found = _hash_files(folder, present)
  except OSError as error:
    return [*problems, f"{error.filename} cannot be read ({error.strerror})"]
  for name in present:
    size, digest = wanted[name]
    if found[name]["bytes"] != size:
      problems.append(f"{name} has {found[name]['bytes']} bytes instead of {size}")
    elif found[name]["sha256"] != digest:
      problems.append(f"{name} differs from its SHA-256")
  return problems


def _listed_files(folder: pathlib.Path) -> list[str]:
  files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
  return sorted(path.as_posix() for path in files if path.as_posix() != NAME)


def _hash_files(folder: pathlib.Path, names: list[str]) -> dict[str, dict[str, int | str]]:
  def entry(name: str) -> dict[str, int | str]:
    with open(folder / name, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
      return {"bytes": file.tell(), "sha256": digest}

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    return dict(zip(names, pool.map(entry, names), strict=True))


def _sync_folder(folder: pathlib.Path) -> None:
  """Makes a rename survive a power cut, not only a crash of the process."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
