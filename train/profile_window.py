"""A trace of a few chosen steps, for xprof or TensorBoard."""

import pathlib
from collections.abc import Callable

import jax

from configs.schema import ProfileConfig


class ProfileWindow:
  """Traces the steps `start_step` ... `start_step + steps - 1`, those of them that are taken.

  Args:
    cfg: which steps.
    folder: where the trace goes.
    report: takes one sentence when it is there.
  """

  def __init__(
    self, cfg: ProfileConfig, folder: pathlib.Path, report: Callable[[str], None]
  ) -> None:
    self._steps = range(cfg.start_step, cfg.start_step + cfg.steps)
    self._folder, self._report = folder, report
    self._tracing = False

  def before(self, step: int) -> None:
    """Call before a step is dispatched."""
    if step in self._steps and not self._tracing:
      jax.profiler.start_trace(str(self._folder))
      self._tracing = True

  def ends_with(self, step: int) -> bool:
    """Whether the loop must wait for this step and call `close`."""
    return self._tracing and step == self._steps[-1]

  def close(self) -> None:
    """Writes the trace, if one is being made."""
    if self._tracing:
      jax.profiler.stop_trace()
      self._tracing = False
      self._report(f"The profile is in {self._folder}.")
