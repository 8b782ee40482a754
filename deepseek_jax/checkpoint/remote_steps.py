"""The checkpoint folder of a run in an object store, which cannot rename.

`<step>/manifest.json` makes a step complete and goes first when it is deleted; `<step>.saving`
exists from the start of a save until its manifest is written, `<step>.deleting` while a step is
deleted. A damaged step has `manifest.damaged-<n>.json` instead of its manifest.

Several processes agree through small objects in `<step>/parts/`: process 0 writes `begun` when
nothing of an earlier attempt is left, process k `written-k` when its own arrays are written and
`hashed-k.json` when it has read its share of all objects; then process 0 writes the manifest.
"""

import contextlib
import json
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from deepseek_jax.checkpoint import manifest, remote_storage, retention
from deepseek_jax.checkpoint.storage import COMMIT_TIMEOUT
from deepseek_jax.storage_path import RemotePath

SAVING, DELETING = ".saving", ".deleting"
PARTS = "parts"
DAMAGED = re.compile(r"manifest\.damaged-(\d+)\.json")
POLL = 0.5  # seconds between two looks at what other processes have written


class RemoteSteps:
  """The folder's steps; process 0 changes what lies beside the arrays.

  Args:
    directory: the folder.
    report: takes one sentence about what was removed.
  """

  def __init__(self, directory: RemotePath, report: Callable[[str], None]) -> None:
    self._directory, self._report = directory, report
    self._storage = remote_storage.RemoteStorage()
    self._complete: set[int] | None = None  # listing a large run takes seconds
    self._process, self._processes = jax.process_index(), jax.process_count()

  def path(self, step: int, suffix: str = "") -> RemotePath:
    return self._directory / f"{step}{suffix}"

  def complete(self) -> list[int]:
    """Steps with a manifest, ascending."""
    if self._process:  # what process 0 does is news only to it
      return manifest.complete_steps(self._directory)
    if self._complete is None:
      self._complete = set(manifest.complete_steps(self._directory))
    return sorted(self._complete)

  def all(self) -> list[int]:
    """Steps, complete or not, ascending; not those that were set aside."""
    firsts = {name.partition("/")[0] for name in self._directory.names_below() if "/" in name}
    aside = {step for step, _ in self._aside()} - set(self.complete())
    return sorted({int(name) for name in firsts if name.isdecimal()} - aside)

  def prepare(self) -> None:
    """Removes what a killed run left half written or half deleted."""
    names = self._directory.names_below()
    for name in names:
      step, dot, kind = name.partition(".")
      if not dot or not step.isdecimal() or "." + kind not in (SAVING, DELETING):
        continue
      folder = self._directory / step
      if "." + kind == DELETING or not manifest.has_manifest(folder):
        (folder / manifest.NAME).unlink()
        folder.remove_tree()
        self._report(f"Removed {step}, which an interrupted run left in {self._directory}.")
      (self._directory / name).unlink()

  def start_save(self, step: int, items: dict[str, Any], documents: dict[str, dict]) -> None:
    """Copies the arrays off the devices, then returns; they may be donated at once. The store is
    not asked for anything yet: a training step must not wait for it.
    """
    self._storage.start_save(self.path(step), items, documents)

  def commit(self, step: int) -> None:
    """In the background: writes everything, and the manifest once all processes have done so."""
    self._begin(step)
    self._storage.wait()
    files = self._hashed(step)
    if self._process:
      return
    manifest.write_manifest(self.path(step), files)
    self.path(step, SAVING).unlink()
    if self._processes > 1:
      (self.path(step) / PARTS).remove_tree()
    self._complete = {*self.complete(), step}

  def interrupted(self, step: int) -> bool:
    """Whether a step without a manifest never had one; `prepare` leaves none."""
    return self.path(step, SAVING).is_file()

  def set_aside(self, step: int, state: str) -> str:
    """Takes the manifest away from a step that is no good. Returns its new name."""
    del state  # prepare() has removed all that are unfinished
    folder = self.path(step)
    taken = [number for other, number in self._aside() if other == step]
    name = f"manifest.damaged-{max(taken, default=0) + 1}.json"
    (folder / name).write_bytes(
      (folder / manifest.NAME).read_bytes() if manifest.has_manifest(folder) else b""
    )
    (folder / manifest.NAME).unlink()
    self._complete = set(self.complete()) - {step}
    return f"{step}/{name}"

  def damaged(self) -> list[str]:
    """Names of what is left of the damaged steps that were set aside."""
    return [f"{step}/manifest.damaged-{number}.json" for step, number in self._aside()]

  def prune(self, *, keep_last: int, keep_every: int) -> None:
    """Removes what the policy of `retention.expendable` does not keep."""
    complete = self.complete()
    old = retention.expendable(complete, keep_last=keep_last, keep_every=keep_every)
    aside = {step for step, _ in self._aside() if step < complete[-keep_last:][0]} - set(complete)
    for step in [*old, *sorted(aside)]:
      self.path(step, DELETING).write_bytes(b"")
      (self.path(step) / manifest.NAME).unlink()
      self.path(step).remove_tree()
      self.path(step, DELETING).unlink()
    self._complete = set(complete) - set(old)

  def remove_partial(self, step: int) -> None:
    """Removes what a failed save wrote, as far as the store lets it."""
    with contextlib.suppress(OSError):
      if not manifest.has_manifest(self.path(step)):
        self.path(step).remove_tree()
        self.path(step, SAVING).unlink()

  def close(self) -> None:
    """Nothing is left open."""

  def free_bytes(self) -> int | None:
    """Nobody knows."""
    return None

  def _begin(self, step: int) -> None:
    """Process 0 empties the place of the step and marks it as being saved; others wait for it."""
    if self._process:
      self._await(step, ["begun"])
      return
    self.path(step, SAVING).write_bytes(b"")
    self.path(step).remove_tree()
    if self._processes > 1:
      (self.path(step) / PARTS / "begun").write_bytes(b"")

  def _aside(self) -> list[tuple[int, int]]:
    """(step, number) of every step that was set aside."""
    names = [name.split("/") for name in self._directory.names_below()]
    return [
      (int(step), int(found[1]))
      for step, *rest in names
      if len(rest) == 1 and step.isdecimal() and (found := DAMAGED.fullmatch(rest[0]))
    ]

  def _hashed(self, step: int) -> manifest.Files:
    """Hashes of all files, read by all processes; complete on process 0."""
    folder, parts = self.path(step), self.path(step) / PARTS
    if self._processes == 1:
      return manifest.hash_files(folder, manifest.listed_files(folder))
    (parts / f"written-{self._process}").write_bytes(b"")
    self._await(step, [f"written-{k}" for k in range(self._processes)])
    names = [n for n in manifest.listed_files(folder) if not n.startswith(f"{PARTS}/")]
    share = [n for n in names if zlib.crc32(n.encode()) % self._processes == self._process]
    files = manifest.hash_files(folder, share)
    (parts / f"hashed-{self._process}.json").write_bytes(json.dumps(files).encode())
    if self._process == 0:
      hashed = [f"hashed-{k}.json" for k in range(self._processes)]
      self._await(step, hashed)
      for name in hashed:
        files |= json.loads((parts / name).read_bytes())
    return files

  def _await(self, step: int, names: list[str]) -> None:
    """Returns when the other processes have written all of these parts."""
    parts, deadline = self.path(step) / PARTS, time.monotonic() + COMMIT_TIMEOUT
    while missing := sorted(set(names) - set(parts.names_below())):
      if time.monotonic() > deadline:
        raise TimeoutError(f"{missing[0]} of step {step} did not come within {COMMIT_TIMEOUT} s")
      time.sleep(POLL)
