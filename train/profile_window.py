"""A trace of a few chosen steps on the devices of the first process, for xprof or TensorBoard."""

import pathlib
import tempfile
from collections.abc import Callable

import jax

from configs.schema import ProfileConfig
from deepseek_jax.storage_path import RemotePath, StoragePath, upload_tree
from train import processes


class ProfileWindow:
  """Traces the steps `start_step` ... `start_step + steps - 1`, those of them that are taken.

  Args:
    cfg: which steps.
    folder: where the trace goes; of a remote one it gets a copy.
    report: takes one sentence when it is there.
  """

  def __init__(
    self, cfg: ProfileConfig, folder: StoragePath, report: Callable[[str], None]
  ) -> None:
    self._steps = range(cfg.start_step, cfg.start_step + cfg.steps)
    self._folder, self._report = folder, report
    self._tracing = False
    self._temporary: tempfile.TemporaryDirectory | None = None

  def before(self, step: int) -> None:
    """Call before a step is dispatched."""
    if step in self._steps and not self._tracing:
      if processes.first():  # all would write into one file
        if isinstance(self._folder, RemotePath):
          self._temporary = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._temporary.name if self._temporary else str(self._folder))
      self._tracing = True

  def ends_with(self, step: int) -> bool:
    """Whether the loop must wait for this step and call `close`; the same on every process."""
    return self._tracing and step == self._steps[-1]

  def close(self) -> None:
    """Writes the trace, if one is being made."""
    if self._tracing:
      self._tracing = False
      if not processes.first():
        return
      jax.profiler.stop_trace()
      if self._temporary is None or not isinstance(self._folder, RemotePath):
        self._report(f"The profile is in {self._folder}.")
        return
      try:
        upload_tree(pathlib.Path(self._temporary.name), self._folder)
        self._report(f"The profile is in {self._folder}.")
      except OSError as error:
        self._report(f"The profile could not be copied to {self._folder}: {error.strerror}.")
      self._temporary.cleanup()
