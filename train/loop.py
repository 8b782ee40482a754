"""The training loop that runs; train/minimal.py is the same step to be read.

Every process of a run is in the same loop: what one of them decides alone (a request to stop, a
damaged record) reaches the others through `Flags`, so that all turn off at the same step.

The device never waits for the host: while it works on step n, the host writes the line of step
n - 1 and fetches the batch of step n + 1. Only at a boundary (validation, checkpoint, end of a
profile, a request to stop) the host waits for step n itself: the next step consumes the state.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from configs.schema import Settings
from data.errors import DataError
from data.pipeline import Batch, Pipeline
from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from deepseek_jax.layout import Layout
from deepseek_jax.optim import low_rank
from deepseek_jax.optim.partition import LOW_RANK
from deepseek_jax.step import TrainState
from deepseek_jax.training_config import LowRankConfig
from train import processes
from train.errors import Exit
from train.evaluate_loss import Validation
from train.metrics import MetricsWriter
from train.processes import Flags, NoMetrics
from train.profile_window import ProfileWindow
from train.signals import StopSignal
from train.step_record import InFlight, StepRecord, replayed_flops


@dataclasses.dataclass(frozen=True)
class Run:
  """What the loop works with."""

  settings: Settings
  last_step: int  # of the stage; the run goes on until settings.total_steps
  step: Callable[[TrainState, Layout], tuple[TrainState, dict[str, jax.Array]]]  # compiled
  place: Callable[[Layout], Layout]
  pipeline: Pipeline
  validation: Validation | None
  checkpoints: Checkpoints
  record: StepRecord
  writer: MetricsWriter | NoMetrics
  profile: ProfileWindow
  stop: StopSignal
  flags: Flags


def train(run: Run, state: TrainState, first_step: int) -> Exit:
  """Takes the steps first_step ... last_step and saves the last one.

  Args:
    run: what to work with; its pipeline stands at first_step.
    state: after step first_step - 1; consumed.
    first_step: steps count from 1.

  A validation that looks before training does so before step 1.

  Returns: Exit.DONE, or Exit.PREEMPTED after a request to stop before the run's last step.
  Raises: DataError, NotFinite, CheckpointError; the lines of the steps before are written.
  """
  if first_step == 1 and run.validation is not None and run.validation.before_training:
    run.writer.write(0, {"tokens": 0} | run.validation.measure(state))
  last, stopping = run.last_step, False
  in_flight: InFlight | None = None
  damaged: tuple[str, ...] = ()  # records, of all processes
  for step in range(first_step, last + 1):
    run.profile.before(step)
    try:
      batch, data_wait = _next_batch(run)
    except DataError:
      _write(run, in_flight, damaged, alone=True)
      raise
    started = time.monotonic()
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      state, metrics = run.step(state, run.place(batch.layout))

    _write(run, in_flight, damaged)
    flops = replayed_flops(run.settings.model, batch.layout)
    in_flight = InFlight(step, metrics, batch.records, started, data_wait, batch.packing, flops)
    run.checkpoints.poll()
    found = not set(run.pipeline.damaged) <= set(damaged)
    stopping, found = run.flags.raised(run.stop.requested, found)
    boundary = _is_boundary(run, step, stopping)
    if found or boundary:
      damaged = processes.union(processes.gather(run.pipeline.damaged))
    if boundary:
      _write(run, in_flight, damaged, state)
      in_flight = None
      if run.profile.ends_with(step):
        run.profile.close()
      if step == last or stopping or step % run.settings.checkpoint.every_steps == 0:
        _save(run, step, state)
    if stopping:
      break
  _finish_saving(run, step)
  return Exit.PREEMPTED if stopping and step < run.settings.total_steps else Exit.DONE


def state_items(state: TrainState) -> dict[str, Any]:
  """The arrays of a state by item; its counters are JSON beside them.

  Factors of low rank are an item of their own, and so are the matrices that they change.
  """
  items = {
    "params": low_rank.without_factors(state.params),
    "optimizer": state.opt_state,
    "router": state.balance,
  }
  if LOW_RANK in state.params:
    items |= {"base": low_rank.changed_matrices(state.params), LOW_RANK: state.params[LOW_RANK]}
  return items


def saved_items(state: TrainState, cfg: LowRankConfig) -> dict[str, Any]:
  """Those of a checkpoint: its "params" are the weights that the model computes with, so that what
  only computes with them need not know of factors.
  """
  items = state_items(state)
  if LOW_RANK in state.params:
    items["params"] = _merge(state.params, cfg)
  return items


def params_of(items: dict[str, Any]) -> Any:
  """The parameters of a state, of the items of its checkpoint."""
  if LOW_RANK not in items:
    return items["params"]
  return low_rank.with_matrices(items["params"], items["base"]) | {LOW_RANK: items[LOW_RANK]}


_merge = jax.jit(low_rank.merged, static_argnums=1)


def _next_batch(run: Run) -> tuple[Batch, float]:
  began = time.monotonic()
  batch = next(run.pipeline)
  return batch, time.monotonic() - began


def _is_boundary(run: Run, step: int, stopping: bool) -> bool:
  return (
    stopping
    or step == run.last_step
    or step % run.settings.checkpoint.every_steps == 0
    or _validates(run, step)
    or run.profile.ends_with(step)
  )


def _validates(run: Run, step: int) -> bool:
  every = run.settings.validation.every_steps
  return run.validation is not None and (step % every == 0 or step == run.settings.total_steps)


def _write(
  run: Run,
  done: InFlight | None,
  damaged: tuple[str, ...],
  state: TrainState | None = None,
  *,
  alone: bool = False,
) -> None:
  """The line of a step, with its validation where `state` is the one after it."""
  if done is None:
    return
  values = run.record.read(done, damaged, alone=alone)
  if state is not None and run.validation is not None and _validates(run, done.step):
    values |= run.validation.measure(state)
    if done.step == run.settings.total_steps:
      values |= run.validation.baseline(run.record.counts.tokens)
  run.writer.write(done.step, values)
  run.record.check()


def _save(run: Run, step: int, state: TrainState) -> None:
  counts = run.record.counts._asdict()
  run.writer.flush()
  items = saved_items(state, run.settings.optim.low_rank)
  run.checkpoints.save(step, items, run.pipeline.state(), counts)


def _finish_saving(run: Run, step: int) -> None:
  newest = run.checkpoints.wait()
  if newest != step:
    raise CheckpointError(f"Step {step} could not be saved; the newest checkpoint is {newest}.")
