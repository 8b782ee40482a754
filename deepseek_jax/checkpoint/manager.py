"""The checkpoints of a run: saved in the background, checked before use, pruned."""

import concurrent.futures
import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from deepseek_jax.checkpoint import manifest, remote_storage, storage
from deepseek_jax.checkpoint.errors import CheckpointError
from deepseek_jax.checkpoint.local_steps import LocalSteps
from deepseek_jax.checkpoint.remote_steps import RemoteSteps
from deepseek_jax.storage_path import RemotePath, StoragePath, storage_path

DOCUMENTS = ("data", "meta")  # the JSON items of a step
NONE = -1  # in place of a step


@dataclasses.dataclass(frozen=True)
class Restored:
  step: int
  items: dict[str, Any]  # as asked for, onto the shardings asked for
  data: dict  # state of the data pipeline
  meta: dict


def restore_step(
  path: str | os.PathLike[str] | StoragePath,
  abstract_items: dict[str, Any],
  *,
  verify: bool = True,
) -> Restored:
  """Reads one step and changes nothing, so it may run beside the run that writes the folder.

  Args:
    path: folder of the step.
    abstract_items: item name -> tree of jax.ShapeDtypeStruct with sharding; a subset will do.
    verify: compare the files with their hashes; False where that has been done.

  Raises: CheckpointError if the step is damaged, unfinished, or does not fit `abstract_items`.
  """
  folder = storage_path(path).absolute()
  if verify and (problems := manifest.verify_step(folder)):
    raise CheckpointError(f"The checkpoint {folder} cannot be used: {_list(problems)}.")
  return _read(folder, abstract_items)


def read_document(step_folder: StoragePath, name: str) -> dict[str, Any]:
  """One of the DOCUMENTS of a step. Raises CheckpointError where it cannot be read."""
  return _form(step_folder).read_document(step_folder, name)


def _log(sentence: str) -> None:
  logging.getLogger(__name__).warning(sentence)


class Checkpoints:
  """Writer and reader of a run's checkpoint folder. One per run: it removes leftovers.

  Args:
    directory: local, created if missing, or of an object store.
    keep_last: the newest so many steps stay.
    keep_every: multiples of it stay for good; 0: none.
    on_error: "stop": a failed save raises from `poll`; "continue": it is reported, and the next
      save tries again.
    report: takes one sentence about something the user should know.

  With several processes every one makes the same calls; process 0 does the work on the folder.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str] | StoragePath,
    *,
    keep_last: int = 3,
    keep_every: int = 0,
    on_error: Literal["stop", "continue"] = "stop",
    report: Callable[[str], None] = _log,
  ) -> None:
    if keep_last < 1:
      raise ValueError(f"checkpoint.keep_last is {keep_last}, accepted are 1, 2, ...")
    self._directory = storage_path(directory).absolute()
    if isinstance(self._directory, RemotePath):
      self._steps = RemoteSteps(self._directory, report)
    else:
      self._steps = LocalSteps(self._directory, report)
    self._keep_last, self._keep_every = keep_last, keep_every
    self._on_error, self._report = on_error, report
    self._primary = jax.process_index() == 0
    self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    self._save_in_flight: concurrent.futures.Future[None] | None = None
    self._saving = NONE  # the step of the save in flight
    self._newest = NONE  # the step that was saved or restored last
    self._bytes_needed = 0
    if self._primary:
      self._prepare_folder()

  def steps(self) -> list[int]:
    """Complete steps, ascending."""
    return self._steps.complete()

  def save(self, step: int, state_items: dict[str, Any], data: dict, meta: dict) -> None:
    """Starts a save; returns when the arrays are copied, so that they may be donated.

    Waits for the save before it, if that is still running. Does nothing for the step that was
    saved or restored last. Metrics up to `step` must be written before: a run that resumes here
    does not compute them again.

    Args:
      step: optimizer steps taken.
      state_items: item name -> tree of jax.Array.
      data: JSON-able state of the data pipeline.
      meta: JSON-able facts about the run; "step" is added.

    Raises: CheckpointError as `poll` does.
    """
    if step == self._newest:
      return
    self._settle()
    self._newest = self._saving = step
    self._bytes_needed = _bytes(state_items)
    try:
      documents = {"data": data, "meta": {**meta, "step": step}}
      self._steps.start_save(step, state_items, documents)
    except storage.SAVE_ERRORS as error:
      self._failed(step, error)
    else:
      self._save_in_flight = self._background.submit(self._finish, step)

  def poll(self) -> None:
    """Cheap; call it every step.

    Raises: CheckpointError, once, if a save failed and on_error is "stop".
    """
    done = self._save_in_flight
    if done is None or not done.done():
      return
    self._save_in_flight = None
    if error := done.exception():
      self._failed(self._saving, error)

  def wait(self) -> int | None:
    """Waits for the save in flight, everywhere. Returns the newest complete step.

    Raises: CheckpointError as `poll` does.
    """
    self._settle()
    # Only process 0 knows that a manifest is there: it writes it after the others are done.
    newest = max(self.steps(), default=NONE) if self._primary else NONE
    newest, _ = _from_primary(newest, False)
    return None if newest == NONE else newest

  def close(self) -> None:
    """Waits for the save in flight and ends the background threads. Raises as `poll` does."""
    try:
      self._settle()
    finally:
      self._background.shutdown()
      self._steps.close()

  def restore(self, abstract_items: dict[str, Any], step: int | None = None) -> Restored | None:
    """Reads the newest good step, or the given one.

    Without `step`, damaged and unfinished steps are reported and set aside on the way.

    Args:
      abstract_items: item name -> tree of jax.ShapeDtypeStruct with sharding; a subset will do.
      step: the only step to consider. To look at, not to train on from: later steps stay.

    Returns: None if nothing was ever saved completely, so that the run starts fresh.
    Raises: CheckpointError if there were steps and none is good, or one does not fit.
    """
    self._settle()
    if step is not None:
      self._newest = step
      return restore_step(self._steps.path(step), abstract_items)
    found = self.newest_good()
    return None if found is None else self.read(found, abstract_items)

  def read(self, step: int, abstract_items: dict[str, Any]) -> Restored:
    """Reads a step that `newest_good` has named or `wait` has seen complete.

    Raises: CheckpointError if it does not fit.
    """
    return _read(self._steps.path(step), abstract_items)

  def newest_good(self) -> int | None:
    """The step that `restore` would read, where its items depend on it; sets aside like it.

    Raises: CheckpointError if there were steps and none is good.
    """
    chosen, failure = NONE, None
    if self._primary:
      try:
        chosen = self._newest_good()
      except CheckpointError as error:
        failure = error
    chosen, failed = _from_primary(chosen, failure is not None)
    if failed:
      raise failure or CheckpointError(f"No usable checkpoint in {self._directory}.")
    if chosen == NONE:
      return None
    self._newest = chosen
    return chosen

  def _settle(self) -> None:
    """Waits for this process's part of the save in flight. Raises as `poll` does."""
    if self._save_in_flight is not None:
      concurrent.futures.wait([self._save_in_flight])
    self.poll()

  def _prepare_folder(self) -> None:
    try:
      self._steps.prepare()
    except OSError as error:
      self._steps.close()
      raise CheckpointError(
        f"The checkpoint folder {self._directory} cannot be used: {error.strerror}."
      ) from error

  def _newest_good(self) -> int:
    """Walks back to a step whose files match its manifest; sets the others aside."""
    for step in reversed(self._steps.all()):
      problems = manifest.verify_step(self._steps.path(step))
      if not problems:
        return step
      state = "unfinished" if self._steps.interrupted(step) else "damaged"
      name = self._steps.set_aside(step, state)
      self._report(f"Checkpoint {step} is {state} ({_list(problems)}); it was set aside as {name}.")
    if damaged := self._steps.damaged():
      raise CheckpointError(
        f"No usable checkpoint is left in {self._directory} (set aside: {', '.join(damaged)}); "
        "restore one from a copy, or move the folder away to start over."
      )
    return NONE

  def _finish(self, step: int) -> None:
    """In the background: the last of the arrays, the manifest, then room for the next step."""
    self._steps.commit(step)
    if self._primary:
      self._steps.prune(keep_last=self._keep_last, keep_every=self._keep_every)

  def _failed(self, step: int, error: BaseException) -> None:
    """Removes the partial step and tells the user; the death of another process is not told.

    JAX reports that, and it is no fault of the storage: a restart is what helps.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
      raise error
    self._newest = NONE
    if self._primary:
      self._steps.remove_partial(step)
    free = self._steps.free_bytes()
    room = "" if free is None else f", {storage.size_text(free)} are free"
    sentence = (
      f"Checkpoint {step} could not be saved in {self._directory}: {storage.reason(error)} "
      f"(it needs about {storage.size_text(self._bytes_needed)}{room})."
    )
    if self._on_error == "stop":
      raise CheckpointError(sentence) from error
    self._report(f"{sentence} The next save tries again.")


def _read(folder: StoragePath, abstract_items: dict[str, Any]) -> Restored:
  items = _form(folder).read_items(folder, abstract_items)
  data, meta = (read_document(folder, name) for name in DOCUMENTS)
  return Restored(step=meta["step"], items=items, data=data, meta=meta)


def _form(step_folder: StoragePath) -> Any:
  """The module that reads a step, by what it holds: people copy steps out of stores."""
  return remote_storage if remote_storage.wrote(step_folder) else storage


def _from_primary(chosen: int, failed: bool) -> tuple[int, bool]:
  """What process 0 decided, on every process."""
  if jax.process_count() == 1:
    return chosen, failed
  told = multihost_utils.broadcast_one_to_all(np.asarray([chosen, failed], np.int32))
  return int(told[0]), bool(told[1])


def _bytes(state_items: dict[str, Any]) -> int:
  """Size of the state, each array counted once however often it is replicated."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(state_items))


def _list(problems: list[str], shown: int = 3) -> str:
  more = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
  return "; ".join(problems[:shown]) + more
