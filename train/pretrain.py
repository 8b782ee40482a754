r"""Trains a model from its beginning, or continues.

  python -m train pretrain --config configs/tiny.py --workdir runs/tiny

What a start begins from, the first of these that is there:
  1. the newest good checkpoint of the run folder, with its place in the data
  2. random weights from `seed`
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Settings
from data.errors import DataError
from data.pipeline import Pipeline
from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from deepseek_jax.flops import activated_parameters, parameters
from deepseek_jax.sharding import make_mesh
from deepseek_jax.step import TrainState
from train import settings as command_line
from train.batches import open_training, placer
from train.errors import Exit, UsageError
from train.evaluate_loss import Validation, comparison
from train.loop import Run, state_items, train
from train.metrics import MetricsWriter
from train.profile_window import ProfileWindow
from train.programs import Programs, build_programs
from train.run_folder import RunFolder, open_run_folder
from train.settings import CommandLine
from train.signals import StopSignal
from train.step_record import Counts, NotFinite, StepRecord


def main(argv: Sequence[str]) -> int:
  """Runs the verb. Returns its exit code; raises UsageError with every problem."""
  try:
    devices = jax.devices()
  except RuntimeError as error:  # JAX_PLATFORMS names what is not there
    raise UsageError([f"JAX finds no device: {str(error).splitlines()[0]}"]) from error
  command = command_line.parse(argv, devices=len(devices))
  try:
    return pretrain(command, devices)
  except NotFinite as error:
    print(error, file=sys.stderr)
    return Exit.STOPPED
  except CheckpointError as error:
    return _leave(error, Exit.CHECK_FAILED)
  except DataError as error:
    return _leave(error, Exit.STOPPED)
  except OSError as error:
    where = error.filename or command.workdir
    return _leave(f"{where} cannot be used: {error.strerror or error}.", Exit.CHECK_FAILED)


def pretrain(command: CommandLine, devices: Sequence) -> Exit:
  """Trains on the given devices, to the end or to a request to stop.

  Raises: UsageError before anything is compiled; CheckpointError, NotFinite, DataError later.
  """
  settings = command.settings
  with contextlib.ExitStack() as stack:
    folder = open_run_folder(
      command.workdir, settings, allow_change=command.allow_change, report=say
    )
    stack.callback(folder.close)
    keep_compiled(folder)
    stop = stack.enter_context(StopSignal(say))
    mesh = make_mesh(settings.mesh, devices)
    stack.enter_context(jax.set_mesh(mesh))
    checkpoints = stack.enter_context(open_checkpoints(folder, settings))
    pipeline = open_data(settings)
    programs = build_programs(settings, mesh)
    validation = open_validation(settings, programs, mesh)

    step, state, counts = restore(checkpoints, programs, pipeline) or (0, None, Counts())
    folder.remember(settings, say)
    if step >= settings.total_steps:
      say(f"The run in {folder.path} is done.")
      say("\n".join(comparison(folder.path)))
      return Exit.DONE
    say(describe(settings, mesh))
    say(f"Continuing after step {step:,}." if state else "Starting from random weights.")

    compiled, state = compile_programs(programs, state)
    profile = ProfileWindow(settings.profile, folder.profiles, say)
    stack.callback(profile.close)
    writer = stack.enter_context(open_metrics(folder, settings, step))
    record = StepRecord(settings, counts, list(devices), writer.say)
    run = Run(
      settings=settings,
      step=compiled,
      place=placer(mesh),
      pipeline=pipeline,
      validation=validation,
      checkpoints=checkpoints,
      record=record,
      writer=writer,
      profile=profile,
      stop=stop,
    )
    ending = train(run, state, step + 1)
    if ending is Exit.DONE:
      writer.say("\n".join(comparison(folder.path)))
    return ending


def say(sentence: str) -> None:
  """Shows a sentence; a progress bar, once there is one, lets it pass above itself."""
  print(sentence, flush=True)


def open_checkpoints(
  folder: RunFolder, settings: Settings
) -> contextlib.AbstractContextManager[Checkpoints]:
  """The run's checkpoints, to be closed at its end. Raises UsageError for an unusable folder."""
  cfg = settings.checkpoint
  try:
    checkpoints = Checkpoints(
      folder.checkpoints,
      keep_last=cfg.keep_last,
      keep_every=cfg.keep_every,
      on_error=cfg.on_error,
      report=say,
    )
  except CheckpointError as error:
    raise UsageError([str(error)]) from error
  return contextlib.closing(checkpoints)


def open_data(settings: Settings) -> Pipeline:
  """The training batches. Raises UsageError where data and configuration do not fit."""
  try:
    return open_training(settings)
  except ValueError as error:
    raise UsageError(str(error).splitlines()) from error


def open_validation(settings: Settings, programs: Programs, mesh: Mesh) -> Validation | None:
  """None where the configuration wants no validation. Raises UsageError as `open_data` does."""
  if not settings.validation.every_steps:
    return None
  try:
    return Validation(settings, programs.evaluate, placer(mesh), say)
  except ValueError as error:
    problem = f"{error} Set validation.every_steps to 0 to do without."
    raise UsageError([problem]) from error


def restore(
  checkpoints: Checkpoints, programs: Programs, pipeline: Pipeline
) -> tuple[int, TrainState, Counts] | None:
  """Steps taken, state and counts of the newest good checkpoint; the pipeline goes to its place.

  Returns: None if there is no checkpoint yet.
  Raises: UsageError if a checkpoint does not fit the configuration or the data.
  """
  abstract = programs.abstract_state
  try:
    restored = checkpoints.restore(state_items(abstract))
    if restored is None:
      return None
    pipeline.restore(restored.data)
  except (CheckpointError, DataError) as error:
    raise UsageError([str(error)]) from error
  counts = Counts.from_json(restored.meta)
  counter = lambda value: jax.device_put(np.int32(value), abstract.step.sharding)
  state = TrainState(
    step=counter(restored.step),
    params=restored.items["params"],
    balance=restored.items["router"],
    opt_state=restored.items["optimizer"],
    skipped=counter(len(counts.skipped_batches)),
  )
  return restored.step, state, counts


def compile_programs(programs: Programs, state: TrainState | None) -> tuple[Callable, TrainState]:
  """The step, compiled ahead of its first call so that no metric contains it, and a state.

  Where none is given, one is made while the step compiles: initial random numbers take as long.
  """
  began = time.monotonic()
  step = programs.step.lower(programs.abstract_state, programs.abstract_batch)
  with ThreadPoolExecutor(max_workers=1) as other:
    compiling = other.submit(step.compile)
    started = state if state is not None else programs.create.lower().compile()()
    compiled = compiling.result()
  say(f"Compiled in {time.monotonic() - began:.1f} s.")
  return compiled, started


def keep_compiled(folder: RunFolder) -> None:
  """Compiled programs stay in the run folder, unless JAX_COMPILATION_CACHE_DIR names another."""
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(folder.path / "compilation_cache"))


def open_metrics(folder: RunFolder, settings: Settings, step: int) -> MetricsWriter:
  """The run's metrics from the line after `step` on."""
  return MetricsWriter(
    folder.path,
    resume_step=step,
    total_steps=settings.total_steps,
    log_every=settings.log.every_steps,
  )


def describe(settings: Settings, mesh: Mesh) -> str:
  """One line: size of the model, devices, mesh, size of a step."""
  total, active = parameters(settings.model)["total"], activated_parameters(settings.model)
  axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
  kind = mesh.devices.flat[0].device_kind
  tokens = settings.data.batch_rows * settings.data.slots
  return (
    f"{total:,} parameters, {active['decode']:,} of them active for a token; "
    f"{mesh.size} x {kind}{f' ({axes})' if axes else ''}; "
    f"{tokens:,} tokens a step, {settings.total_steps:,} steps."
  )


def _leave(error: Exception | str, code: Exit) -> NoReturn:
  """Ends the process without waiting for the threads of a blocked read or a broken save."""
  print(error, file=sys.stderr, flush=True)
  sys.stdout.flush()
  os._exit(code)
