"""From the device's metrics of a step to its line in metrics.jsonl, and the counts behind it."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax

from configs.schema import Settings
from deepseek_jax.config import ModelConfig
from deepseek_jax.flops import flops_per_token, layout_flops, peak_flops
from deepseek_jax.layout import Layout, real_slots
from train import processes


class NotFinite(Exception):
  """Too many steps in a row without a finite gradient; the message names their records."""


class InFlight(NamedTuple):
  """A step that the device may still be working on."""

  step: int
  metrics: dict[str, jax.Array]
  records: tuple[str, ...]  # of the rows that this process has read
  started: float  # monotonic seconds, at dispatch
  data_wait: float  # seconds
  packing: dict[str, float]  # how full the rows are that this process has read
  flops: float | None = None  # see replayed_flops


class Counts(NamedTuple):
  """What a run has counted so far; every checkpoint carries it."""

  tokens: int = 0
  skipped_steps: int = 0  # over the whole run
  skipped_batches: tuple[tuple[int, tuple[str, ...]], ...] = ()  # (step, records) of those in a row
  damaged: tuple[str, ...] = ()  # records that could not be read

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> Self:
    """The inverse of `_asdict` after a journey through JSON."""
    return cls(
      values["tokens"],
      values["skipped_steps"],
      tuple((step, tuple(records)) for step, records in values["skipped_batches"]),
      tuple(values["damaged"]),
    )


def replayed_flops(cfg: ModelConfig, layout: Layout) -> float | None:
  """Model FLOPs a token of rows with replay; None for exact rows, which all take the same."""
  if layout.tokens.shape == layout.decoder_slots.shape:
    return None
  return layout_flops(cfg, layout) / max(1, int(real_slots(layout).sum()))


class StepRecord:
  """Reads steps in order and keeps the counts; every process makes the same calls.

  Args:
    settings: of the run.
    counts: of the steps before.
    devices: that the run works on.
    report: takes one sentence about something the user should know.
  """

  def __init__(
    self, settings: Settings, counts: Counts, devices: list, report: Callable[[str], None]
  ) -> None:
    self.counts = counts
    self._max_skipped, self._report = settings.max_skipped_steps, report
    self._flops = flops_per_token(settings.model, "train", settings.data.slots)
    peak = peak_flops(devices[0].device_kind)
    self._peak = None if peak is None else peak * len(devices)
    if peak is None:
      report(f"mfu stays empty: the peak rate of a {devices[0].device_kind} is not known.")
    self._ready = 0.0  # when the step before was seen to be done

  def read(
    self, done: InFlight, damaged: tuple[str, ...], *, alone: bool = False
  ) -> dict[str, Any]:
    """Waits for the step. Returns the values of its line.

    Args:
      done: the step after the one read before.
      damaged: records that pipelines have left out since they were opened, of all processes.
      alone: the other processes do not make this call.
    """
    values = {name: value.item() for name, value in jax.device_get(done.metrics).items()}
    ready = time.monotonic()
    seconds, self._ready = ready - max(done.started, self._ready), ready
    tokens = values.pop("tokens")
    skipped = values["skipped"] > 0
    records = done.records
    if skipped and not alone:
      records = processes.union(processes.gather(records))
    self._count(done._replace(records=records), tokens, skipped, damaged)
    rate = tokens / seconds
    flops = self._flops if done.flops is None else done.flops
    return {
      "tokens": self.counts.tokens,
      "loss": values.pop("loss"),
      "grad_norm": values.pop("grad_norm"),
      "lr": values.pop("lr"),
      "tokens_per_second": rate,
      "step_seconds": seconds,
      "data_wait_seconds": done.data_wait,
      "mfu": None if self._peak is None else rate * flops / self._peak,
      **done.packing,
      **values,
      "skipped_steps": self.counts.skipped_steps,
      "damaged_records": len(self.counts.damaged),
    }

  def check(self) -> None:
    """Raises NotFinite when `max_skipped_steps` steps in a row were skipped."""
    batches = self.counts.skipped_batches
    if len(batches) < self._max_skipped:
      return
    named = "; ".join(f"step {step}: {', '.join(filter(None, names))}" for step, names in batches)
    raise NotFinite(
      f"Loss or gradient was not finite in {len(batches)} steps in a row, as many as "
      f"max_skipped_steps allows. Their records are {named}."
    )

  def _count(self, done: InFlight, tokens: int, skipped: bool, damaged: tuple[str, ...]) -> None:
    before = self.counts
    batches = (*before.skipped_batches, (done.step, done.records)) if skipped else ()
    known = tuple(dict.fromkeys((*before.damaged, *damaged)))
    self.counts = Counts(before.tokens + tokens, before.skipped_steps + skipped, batches, known)
    if skipped:
      self._report(f"Step {done.step} changed nothing: its loss or gradient is not finite.")
    if new := known[len(before.damaged) :]:
      self._report(f"Damaged records were left out: {', '.join(new)} ({len(known)} so far).")
