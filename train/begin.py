"""The beginning of a stage, or of its rest: programs, data and state for the steps that follow.

A start of the program and a border between two stages are the same: the state is read from the
newest checkpoint, so that a run that was interrupted at a border is the one that was not.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from data.errors import DataError
from data.pipeline import Batch, Pipeline, open_pipeline
from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from deepseek_jax.layout import Layout
from deepseek_jax.step import TrainState
from train import stages
from train.batches import RowGroup, open_training, placer, row_group
from train.errors import UsageError
from train.evaluate_loss import Validation
from train.loop import params_of, state_items
from train.origin import Origin, first_state
from train.processes import say
from train.programs import Programs, build_programs
from train.replay_report import ReplayReport
from train.row_shapes import Step, compile_step
from train.settings import SFT
from train.stages import RunStage
from train.step_record import Counts


class Begun(NamedTuple):
  """A stage that can compile."""

  programs: Programs
  group: RowGroup
  pipeline: Pipeline  # at the next step
  validation: Validation | None
  state: TrainState | None  # None: random weights, not made yet
  counts: Counts


def begin(
  plan: Sequence[RunStage],
  stage: RunStage,
  mesh: Mesh,
  checkpoints: Checkpoints,
  step: int,
  origin: Origin,
) -> Begun:
  """What a stage works with after step `step`, which it or the stage before it has taken.

  Call it under `jax.set_mesh`; reads the checkpoint of the step, or of the origin if the step is 0.

  Raises: UsageError if data, configuration, processes and checkpoint do not fit.
  """
  spans = tuple(part.span for part in plan)
  try:
    group = row_group(stage.settings, mesh)
    pipeline = open_training(stage.settings, group, stages.rows_before(plan, stage))
  except ValueError as error:
    raise UsageError(str(error).splitlines()) from error
  programs = build_programs(stage.settings, mesh, spans)
  validation = _open_validation(plan, stage, programs, mesh, group, origin.verb)
  state, counts = None, Counts()
  if step > 0:
    state, counts = _restore(plan, stage, mesh, programs, pipeline, checkpoints, step)
  elif origin.stored is not None:
    state = first_state(origin, programs, stage.settings, pipeline.tokenizer)
  return Begun(programs, group, pipeline, validation, state, counts)


def _open_validation(
  plan: Sequence[RunStage],
  stage: RunStage,
  programs: Programs,
  mesh: Mesh,
  group: RowGroup,
  verb: str,
) -> Validation | None:
  """None where the configuration wants no validation."""
  if not stage.settings.validation.every_steps:
    return None
  kind = ReplayReport if verb == SFT else Validation
  try:
    return kind(
      stage.settings, programs.evaluate, placer(mesh, group), group, say, lambda: _batches(plan)
    )
  except ValueError as error:
    problem = f"{error} Set validation.every_steps to 0 to do without."
    raise UsageError([problem]) from error


def _batches(plan: Sequence[RunStage]) -> Iterator[Batch]:
  """Those of the whole run, of all hosts, without entries and Engram rows."""
  for stage in plan:
    before = stages.rows_before(plan, stage)
    pipeline = open_pipeline(stage.settings.data, ratios=(), engram=None, begin=before)
    yield from islice(pipeline, stage.span.updates)


def _restore(
  plan: Sequence[RunStage],
  stage: RunStage,
  mesh: Mesh,
  programs: Programs,
  pipeline: Pipeline,
  checkpoints: Checkpoints,
  step: int,
) -> tuple[TrainState, Counts]:
  """State and counts after a step; the pipeline goes to its place.

  At the end of a stage the step belongs to another one. Then the pipeline is at its place, and the
  optimizer keeps what it has of the parameters that go on training.
  """
  abstract, saved_in = programs.abstract_state, stages.stage_of(plan, step)
  wanted = state_items(abstract)
  if saved_in is not stage:
    as_saved = dataclasses.replace(stage.settings, optim=saved_in.settings.optim)
    before = build_programs(as_saved, mesh, [part.span for part in plan]).abstract_state
    wanted = state_items(before)
  try:
    restored = checkpoints.read(step, wanted)
    if saved_in is stage:
      pipeline.restore(restored.data)
  except (CheckpointError, DataError) as error:
    raise UsageError([str(error)]) from error
  counts = Counts.from_json(restored.meta)
  counter = lambda value: jax.device_put(np.int32(value), abstract.step.sharding)
  state = TrainState(
    step=counter(restored.step),
    params=params_of(restored.items),
    balance=restored.items["router"],
    opt_state=_going_on(restored.items["optimizer"], abstract.opt_state),
    skipped=counter(len(counts.skipped_batches)),
  )
  return state, counts


def _going_on(saved: Any, wanted: Any) -> Any:
  """An optimizer's state as `wanted` describes it; what was not saved starts at 0, as all does."""
  known = dict(jax.tree.leaves_with_path(saved))

  def choose(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
    if path in known:
      return known[path]
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)

  return jax.tree.map_with_path(choose, wanted)


def compile_programs(begun: Begun, batches: list[Layout]) -> tuple[Step, TrainState]:
  """The step, compiled for these batches ahead of its first call so that no metric contains it, and
  a state.

  Where none has begun, one is made while the step compiles: initial random numbers take as long.
  """
  began = time.monotonic()
  with ThreadPoolExecutor(max_workers=1) as other:
    if begun.state is None:
      create = begun.programs.create.lower()  # here: the mesh is this thread's
      creating = other.submit(lambda: create.compile()())
    compiled = compile_step(begun.programs, batches)
    started = begun.state if begun.state is not None else creating.result()
  say(f"Compiled in {time.monotonic() - began:.1f} s.")
  return compiled, started
