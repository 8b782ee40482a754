r"""Trains a model from its beginning, or continues.

  python -m train pretrain --config configs/tiny.py --workdir runs/tiny

What a start begins from, the first of these that is there:
  1. the newest good checkpoint of the run folder, with its place in the data
  2. random weights from `seed`
"""

import contextlib
import errno
import secrets
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from configs.schema import Settings
from data.errors import DataError
from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from deepseek_jax.flops import activated_parameters, parameters
from deepseek_jax.sharding import make_mesh, slice_count
from train import processes, stages
from train import settings as command_line
from train.batches import placer
from train.begin import Begun, begin, compile_programs
from train.errors import Exit, UsageError
from train.evaluate_loss import comparison
from train.loop import Run, train
from train.metrics import MetricsWriter
from train.optimizer_table import optimizer_table
from train.origin import Origin, find_origin, remember
from train.processes import Flags, NoMetrics, leave, say, signed, warn
from train.profile_window import ProfileWindow
from train.row_shapes import abstract_batches
from train.run_folder import RunFolder, open_run_folder
from train.settings import PRETRAIN, CommandLine
from train.signals import StopSignal
from train.stage_table import stage_table
from train.stages import RunStage
from train.step_record import NotFinite, StepRecord

# Of storage, what a user must change before another start can succeed.
LASTING = (
  *(errno.EACCES, errno.EPERM, errno.EROFS),
  *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
  *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


def main(argv: Sequence[str], verb: str = PRETRAIN) -> int:
  """Runs the verb, or another that trains. Returns its exit code; raises UsageError with every
  problem.
  """
  devices = join_and_find_devices()
  with processes.agreed():
    command = command_line.parse(argv, devices=len(devices), slices=slice_count(devices), verb=verb)
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
  """Trains on the given devices, stage after stage, to the end or to a request to stop.

  Raises: UsageError before anything is compiled; CheckpointError, NotFinite, DataError later.
  """
  settings, plan = command.settings, stages.resolve(command.settings)
  with contextlib.ExitStack() as stack:
    with starting(command.workdir):
      folder = open_run_folder(
        command.workdir, settings, allow_change=command.allow_change, report=say
      )
      stack.callback(folder.close)
    check_shared(folder)
    keep_compiled(folder)
    stop = stack.enter_context(StopSignal(warn))
    with starting(command.workdir):
      checkpoints = stack.enter_context(open_checkpoints(folder, settings))
    with starting(command.workdir):
      step = newest_step(checkpoints)
    with starting(command.workdir):
      origin = find_origin(command, folder, step)
    if step >= settings.total_steps:
      with starting(command.workdir):
        folder.remember(settings, say)
      say(f"The run in {folder.path} is done.")
      if processes.first():
        say("\n".join(comparison(folder.path)))
      return Exit.DONE

    profile = ProfileWindow(settings.profile, folder.profiles, say)
    stack.callback(profile.close)
    writer, ending = None, Exit.DONE
    for stage in plan[plan.index(stages.stage_of(plan, step + 1)) :]:
      with jax.set_mesh(mesh := make_mesh(stage.settings.mesh, devices)):
        with starting(command.workdir):
          begun = begin(plan, stage, mesh, checkpoints, step, origin)
        if writer is None:
          with starting(command.workdir):
            folder.remember(settings, say)
            if not step:
              remember(origin, folder)
          say(stage_table(plan))
        announce(plan, stage, begun, mesh, step, origin)
        compiled, state = compile_programs(begun, abstract_batches(stage.settings, mesh))
        if writer is None:
          with starting(command.workdir):
            writer = stack.enter_context(open_metrics(folder, settings, step))
        run = Run(
          settings=stage.settings,
          last_step=stage.last_step,
          step=compiled,
          place=placer(mesh, begun.group),
          pipeline=begun.pipeline,
          validation=begun.validation,
          checkpoints=checkpoints,
          record=StepRecord(stage.settings, begun.counts, list(devices), writer.say),
          writer=writer,
          profile=profile,
          stop=stop,
          flags=Flags(mesh),
        )
        del begun  # with the state, which the first step consumes
        ending = train(run, state, step + 1)
      if ending is not Exit.DONE:
        return ending
      step = stage.last_step
    if writer is not None and processes.first():
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


def newest_step(checkpoints: Checkpoints) -> int:
  """The last step whose checkpoint is good; 0 for none. Raises UsageError if all are damaged."""
  try:
    return checkpoints.newest_good() or 0
  except CheckpointError as error:
    raise UsageError([str(error)]) from error


def announce(
  plan: Sequence[RunStage], stage: RunStage, begun: Begun, mesh: Mesh, step: int, origin: Origin
) -> None:
  """What begins, and how the optimizer treats each parameter, where nobody has said it before."""
  place = plan.index(stage)
  if place:
    say(f"Stage {stage.name}, steps {stage.first_step:,} to {stage.last_step:,}.")
  say(describe(stage.settings, mesh))
  optim, before = stage.settings.optim, plan[place - 1].settings.optim
  if step + 1 == stage.first_step and (not place or optim != before):
    say(optimizer_table(begun.programs.abstract_state.params, stage.settings))
  start = "random weights" if origin.stored is None else str(origin.stored.path)
  say(f"Continuing after step {step:,}." if step else f"Starting from {start}.")


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
  return (
    f"{total:,} parameters, {active['decode']:,} of them active for a token; "
    f"{mesh.size} x {kind}{f' ({axes})' if axes else ''}; "
    f"{stages.tokens_per_step(settings):,} tokens a step, {settings.total_steps:,} steps."
  )


def _unusable(error: OSError, workdir: str) -> str:
  return f"{error.filename or workdir} cannot be used: {error.strerror or error}."
