"""The folder of a run: made, locked, and checked against the configuration that continues it.

It is local, or below s3:// or gs://; then the lines of the metrics are in segments, the events come
with each checkpoint, and compiled programs stay on this machine.

config.json        resolved configuration, every key
environment.json   versions, git revision, devices, XLA flags of the last start
optimizer.json     what the code has each parameter treated as
metrics.jsonl      train/metrics.py, train/metric_lines.py
events.*           TensorBoard
checkpoints/       deepseek_jax/checkpoint
profiles/
run.lock           train/lock.py, train/remote_lock.py
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from configs.schema import Settings
from deepseek_jax.checkpoint import manifest
from deepseek_jax.optim.partition import changed_rules, fixed_rules
from deepseek_jax.storage_path import (
  RemotePath,
  StoragePath,
  cache_folder,
  storage_path,
  write_atomically,
)
from train import environment
from train.errors import UsageError
from train.lock import RunLock
from train.remote_lock import RemoteLock
from train.settings import differences, resolved_json, settings_from_json

# What may change between two starts of a run without changing what it computes. data.paths is here
# because the pipeline's saved state compares the data themselves.
FREE = (
  "checkpoint",
  "data.max_damaged_records",
  "data.paths",
  "data.prefetch_batches",
  "data.reader_threads",
  "data.stall_seconds",
  "log",
  "max_skipped_steps",
  "profile",
  "validation",
)
# What may change, but then the losses agree closely instead of bit for bit.
REPORTED = ("mesh", "accumulation", "model.moe.receive_factor")


@dataclasses.dataclass(frozen=True)
class RunFolder:
  path: StoragePath
  lock: RunLock | RemoteLock | None  # None on processes other than the first

  @property
  def checkpoints(self) -> StoragePath:
    return self.path / "checkpoints"

  @property
  def profiles(self) -> StoragePath:
    return self.path / "profiles"

  @property
  def compilation_cache(self) -> pathlib.Path:
    """JAX writes it file by file while it compiles, so it is always local."""
    if isinstance(self.path, RemotePath):
      return cache_folder() / "compilation_cache"
    return self.path / "compilation_cache"

  def remember(self, settings: Settings, report: Callable[[str], None]) -> None:
    """Writes config, environment and optimizer.json of a start that nothing refuses any more.

    Raises: UsageError if they cannot be written.
    """
    if self.lock is None:
      return
    now = environment.environment()
    for sentence in environment.changes(_read_json(self.path / "environment.json") or now, now):
      report(sentence)
    try:
      write_atomically(self.path / "config.json", resolved_json(settings).encode())
      text = json.dumps(now, indent=2) + "\n"
      write_atomically(self.path / "environment.json", text.encode())
      rules = json.dumps(fixed_rules(), indent=2) + "\n"
      write_atomically(self.path / "optimizer.json", rules.encode())
    except OSError as error:
      raise UsageError([f"--workdir {self.path} cannot be used: {error.strerror}."]) from error

  def close(self) -> None:
    """Gives the folder to the next run."""
    if self.lock is not None:
      self.lock.release()


def open_run_folder(
  workdir: str, settings: Settings, *, allow_change: bool, report: Callable[[str], None]
) -> RunFolder:
  """Makes or continues the run folder; process 0 writes, the others only learn the paths.

  While `checkpoints/` has no complete step, the configuration may change freely.

  Args:
    workdir: path or URL of the folder.
    settings: configuration of this start.
    allow_change: accept a configuration that computes something else than the run so far.
    report: takes one sentence about something the user should know.

  Raises: UsageError if the folder is in use, cannot be written, or belongs to another
    configuration.
  """
  path = storage_path(workdir).absolute()
  if jax.process_index() != 0:
    return RunFolder(path, None)
  try:
    lock = _lock(path, report)
  except OSError as error:
    raise UsageError([f"--workdir {path} cannot be used: {error.strerror}."]) from error
  folder = RunFolder(path, lock)
  if isinstance(path, RemotePath) and jax.config.jax_compilation_cache_dir is None:
    report(f"Compiled programs are kept on this machine, in {folder.compilation_cache}.")
  try:
    if manifest.complete_steps(folder.checkpoints):
      _check_config(folder, settings, allow_change, report)
  except OSError as error:
    folder.close()
    raise UsageError([f"--workdir {path} cannot be used: {error.strerror}."]) from error
  except BaseException:
    folder.close()
    raise
  return folder


def _lock(path: StoragePath, report: Callable[[str], None]) -> RunLock | RemoteLock:
  if isinstance(path, RemotePath):
    return RemoteLock(path, report)
  path.mkdir(parents=True, exist_ok=True)
  return RunLock(path, report)


def _check_config(
  folder: RunFolder, settings: Settings, allow_change: bool, report: Callable[[str], None]
) -> None:
  advice = "Use another --workdir, or give --allow-change to continue with the new values."
  try:
    stored = settings_from_json((folder.path / "config.json").read_text(encoding="utf-8"))
  except (OSError, ValueError, TypeError) as error:
    problem = f"{folder.path / 'config.json'} cannot be read ({error})."
    if not allow_change:
      raise UsageError([problem, advice]) from error
    report(f"{problem} Continuing without the comparison.")
    return
  rules = changed_rules(_read_json(folder.path / "optimizer.json") or {})
  binding = differences(stored, settings, ignoring=(*FREE, *REPORTED)) + rules
  if binding and not allow_change:
    raise UsageError([f"The run in {folder.path} has another configuration.", *binding, advice])
  for sentence in differences(stored, settings, ignoring=FREE) + rules:
    report(f"{sentence} The run continues, and is not the same bit for bit.")


def _read_json(path: StoragePath) -> dict[str, Any] | None:
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return None
