r"""Trains a model from its beginning, or continues.

  python -m train pretrain --config configs/tiny.py --workdir runs/tiny

What a start begins from, the first of these that is there:
  1. the newest good checkpoint of the run folder, with its place in the data
  2. random weights from `seed`
"""

import contextlib
import errno
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Settings
from data.errors import DataError
from data.pipeline import Pipeline
from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from deepseek_jax.flops import activated_parameters, parameters
from deepseek_jax.sharding import make_mesh, slice_count
from deepseek_jax.step import TrainState
from train import processes
from train import settings as command_line
from train.batches import RowGroup, open_training, placer, row_group
from train.errors import Exit, UsageError
from train.evaluate_loss import Validation, comparison
from train.loop import Run, state_items, train
from train.metrics import MetricsWriter
from train.optimizer_table import optimizer_table
from train.processes import Flags, NoMetrics, leave, say, signed, warn
from train.profile_window import ProfileWindow
from train.programs import Programs, build_programs
from train.run_folder import RunFolder, open_run_folder
from train.settings import CommandLine
from train.signals import StopSignal
from train.step_record import Counts, NotFinite, StepRecord

# Of storage, what a user must change before another start can succeed.
LASTING = (
  *(errno.EACCES, errno.EPERM, errno.EROFS),
  *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
  *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


def main(argv: Sequence[str]) -> int:
  """Runs the verb. Returns its exit code; raises UsageError with every problem."""
  devices = join_and_find_devices()
  with processes.agreed():
    command = command_line.parse(argv, devices=len(devices), slices=slice_count(devices))
  try:
    return pretrain(command, devices)
  except NotFinite as error:  # every process has it
    processes.complain(str(error))
    return Exit.STOPPED
  except CheckpointError as error:
    leave(signed(str(error)), Exit.CHECK_FAILED)
  except DataError as error:
    leave(signed(str(error)), Exit.STOPPED)
  except OSError as error:
    leave(signed(_unusable(error, command.workdir)), Exit.CRASHED)


def join_and_find_devices() -> Sequence:
  """Those of all processes. Raises UsageError; ends the process where a restart may help."""
  processes.join()
  try:
    return jax.devices()
  except RuntimeError as error:
    problem = f"JAX finds no device: {str(error).splitlines()[0]}"
    if jax.distributed.is_initialized():  # or not those of the others, within JAX's patience
      leave(problem, Exit.CRASHED)
    raise UsageError([problem]) from error  # JAX_PLATFORMS names what is not there


def pretrain(command: CommandLine, devices: Sequence) -> Exit:
  """Trains on the given devices, to the end or to a request to stop.

  Raises: UsageError before anything is compiled; CheckpointError, NotFinite, DataError later.
  """
  settings = command.settings
  with contextlib.ExitStack() as stack:
    with starting(command.workdir):
      folder = open_run_folder(
        command.workdir, settings, allow_change=command.allow_change, report=say
      )
      stack.callback(folder.close)
    check_shared(folder)
    keep_compiled(folder)
    stop = stack.enter_context(StopSignal(warn))
    mesh = make_mesh(settings.mesh, devices)
    stack.enter_context(jax.set_mesh(mesh))
    with starting(command.workdir):
      checkpoints = stack.enter_context(open_checkpoints(folder, settings))
      group, pipeline = open_data(settings, mesh)
      programs = build_programs(settings, mesh)
      validation = open_validation(settings, programs, mesh, group)

    with starting(command.workdir):
      step, state, counts = restore(checkpoints, programs, pipeline) or (0, None, Counts())
    with starting(command.workdir):
      folder.remember(settings, say)
    if step >= settings.total_steps:
      say(f"The run in {folder.path} is done.")
      if processes.first():
        say("\n".join(comparison(folder.path)))
      return Exit.DONE
    say(describe(settings, mesh))
    if state is None:  # a start that continues has said it before
      say(optimizer_table(programs.abstract_state.params, settings))
    say(f"Continuing after step {step:,}." if state else "Starting from random weights.")

    compiled, state = compile_programs(programs, state)
    profile = ProfileWindow(settings.profile, folder.profiles, say)
    stack.callback(profile.close)
    with starting(command.workdir):
      writer = stack.enter_context(open_metrics(folder, settings, step))
    record = StepRecord(settings, counts, list(devices), writer.say)
    run = Run(
      settings=settings,
      step=compiled,
      place=placer(mesh, group),
      pipeline=pipeline,
      validation=validation,
      checkpoints=checkpoints,
      record=record,
      writer=writer,
      profile=profile,
      stop=stop,
      flags=Flags(mesh),
    )
    ending = train(run, state, step + 1)
    if ending is Exit.DONE and processes.first():
      writer.say("\n".join(comparison(folder.path)))
    return ending


@contextlib.contextmanager
def starting(workdir: str) -> Iterator[None]:
  """A part of the start: every process leaves it, or all end with the problems of any of them.

  Raises: UsageError, also for bad data, a full disk and the like; another OSError is left to a
    restart.
  """
  with processes.agreed():
    try:
      yield
    except DataError as error:
      raise UsageError([str(error)]) from error
    except OSError as error:
      if error.errno not in LASTING:
        raise
      raise UsageError([_unusable(error, workdir)]) from error


def check_shared(folder: RunFolder) -> None:
  """Raises UsageError if a process sees another folder under this path than the first one does.

  Each would keep its part of a checkpoint to itself, and no start could put them together again.
  """
  if jax.process_count() == 1:
    return
  mark = folder.path / f"shared.{processes.gather([secrets.token_hex(8)])[0][0]}"
  with starting(str(folder.path)):
    if processes.first():
      mark.write_bytes(b"")
  try:
    with starting(str(folder.path)):
      if not mark.is_file():
        raise UsageError(
          [f"--workdir {folder.path} is another folder here than on process 0; all must share it."]
        )
  finally:
    if processes.first():
      mark.unlink()


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
      report=warn,
    )
  except CheckpointError as error:
    raise UsageError([str(error)]) from error
  return contextlib.closing(checkpoints)


def open_data(settings: Settings, mesh: Mesh) -> tuple[RowGroup, Pipeline]:
  """Which rows this process reads, and the batches that hold them.

  Raises: UsageError where data, configuration and processes do not fit.
  """
  try:
    group = row_group(settings, mesh)
    return group, open_training(settings, group)
  except ValueError as error:
    raise UsageError(str(error).splitlines()) from error


def open_validation(
  settings: Settings, programs: Programs, mesh: Mesh, group: RowGroup
) -> Validation | None:
  """None where the configuration wants no validation. Raises UsageError as `open_data` does."""
  if not settings.validation.every_steps:
    return None
  try:
    return Validation(settings, programs.evaluate, placer(mesh, group), group, say)
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
    jax.config.update("jax_compilation_cache_dir", str(folder.compilation_cache))


def open_metrics(folder: RunFolder, settings: Settings, step: int) -> MetricsWriter | NoMetrics:
  """The run's metrics from the line after `step` on, which the first process writes."""
  if not processes.first():
    return NoMetrics()
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


def _unusable(error: OSError, workdir: str) -> str:
  return f"{error.filename or workdir} cannot be used: {error.strerror or error}."
