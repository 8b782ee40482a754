"""The checkpoint folder of a run on a file system.

`<step>/` is complete once it has a manifest; `<step>.saving` exists from the start of a save until
its manifest is written, which tells an interrupted save from a lost manifest;
`<step>.damaged-<n>` and `<step>.unfinished-<n>` were set aside; `<step>.deleting` is being removed.
"""

import contextlib
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax

from deepseek_jax.checkpoint import manifest, retention, storage

SAVING, DELETING = ".saving", ".deleting"
ASIDE = re.compile(r"(\d+)\.(damaged|unfinished)-(\d+)")


class LocalSteps:
  """The folder's steps. With several processes all share it, and process 0 changes it.

  Args:
    directory: need not exist.
    report: takes one sentence about what was removed.
  """

  def __init__(self, directory: pathlib.Path, report: Callable[[str], None]) -> None:
    self._directory, self._report = directory, report
    self._storage = storage.Storage()

  def path(self, step: int, suffix: str = "") -> pathlib.Path:
    return self._directory / f"{step}{suffix}"

  def complete(self) -> list[int]:
    """Steps with a manifest, ascending."""
    return manifest.complete_steps(self._directory)

  def all(self) -> list[int]:
    """Steps, complete or not, ascending."""
    return sorted(int(p.name) for p in self._directory.glob("*") if p.name.isdecimal())

  def prepare(self) -> None:
    """Makes the folder and removes what a killed run left half written or half deleted."""
    self._directory.mkdir(parents=True, exist_ok=True)
    for path in self._directory.iterdir():
      if storage.PARTIAL_MARK in path.name or path.name.endswith(DELETING):
        shutil.rmtree(path)
        self._report(f"Removed {path.name}, which an interrupted run left in {self._directory}.")
    for mark in self._directory.glob(f"*{SAVING}"):
      step_folder = mark.with_suffix("")
      if not step_folder.is_dir() or manifest.has_manifest(step_folder):
        mark.unlink()

  def start_save(self, step: int, items: dict[str, Any], documents: dict[str, dict]) -> None:
    """Copies the arrays off the devices, then returns; they may be donated at once."""
    if jax.process_index() == 0:
      self.path(step, SAVING).touch()
    self._storage.start_save(self.path(step), items, documents)

  def commit(self, step: int) -> None:
    """In the background: Orbax's commit, then the manifest."""
    self._storage.wait()
    if jax.process_index() == 0:
      manifest.write_manifest(self.path(step))
      self.path(step, SAVING).unlink()

  def interrupted(self, step: int) -> bool:
    """Whether a step without a manifest never had one."""
    return self.path(step, SAVING).exists()

  def set_aside(self, step: int, state: str) -> str:
    """Takes a step that is no good out of the way. Returns its new name."""
    taken = [int(m[3]) for m in self._aside() if int(m[1]) == step and m[2] == state]
    target = self.path(step, f".{state}-{max(taken, default=0) + 1}")
    self.path(step).rename(target)
    self.path(step, SAVING).unlink(missing_ok=True)
    return target.name

  def damaged(self) -> list[str]:
    """Names of the damaged steps that were set aside."""
    return [m[0] for m in self._aside() if m[2] == "damaged"]

  def prune(self, *, keep_last: int, keep_every: int) -> None:
    """Removes what the policy of `retention.expendable` does not keep."""
    complete = self.complete()
    old = retention.expendable(complete, keep_last=keep_last, keep_every=keep_every)
    oldest_recent = complete[-keep_last:][0]
    aside = [self._directory / m[0] for m in self._aside() if int(m[1]) < oldest_recent]
    for path in [*(self.path(step) for step in old), *aside]:
      # Renamed first: a step that is half deleted must not look damaged.
      leaving = path.with_name(path.name + DELETING)
      path.rename(leaving)
      shutil.rmtree(leaving)

  def remove_partial(self, step: int) -> None:
    """Removes what a failed save wrote, as far as the file system lets it."""
    for path in self._directory.glob(f"{step}*"):
      unfinished = path.name == f"{step}" and not manifest.has_manifest(path)
      if unfinished or path.name.startswith(f"{step}{storage.PARTIAL_MARK}"):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # of a file system that became read-only
      self.path(step, SAVING).unlink()

  def close(self) -> None:
    """Ends the background threads."""
    self._storage.close()

  def free_bytes(self) -> int | None:
    """Room that is left; None where nobody knows."""
    existing = next(p for p in (self._directory, *self._directory.parents) if p.is_dir())
    return shutil.disk_usage(existing).free

  def _aside(self) -> list[re.Match[str]]:
    names = sorted(path.name for path in self._directory.iterdir())
    return [found for name in names if (found := ASIDE.fullmatch(name))]
