"""A run on this machine, under the supervisor: one process, several, or this host's part of a pod.

What a process is told, in its environment:
  JAX_NUM_PROCESSES        processes of the run; absent for a single one; "auto" on a host of a pod
                           or a Slurm job, where JAX itself finds the number, the place and the
                           coordinator
  JAX_PROCESS_ID           0 ... JAX_NUM_PROCESSES - 1
  JAX_COORDINATOR_ADDRESS  host:port on which process 0 listens
  JAX_LOCAL_DEVICE_IDS     GPUs of this process, where several share a machine; JAX reads it
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from deepseek_jax.checkpoint import manifest
from deepseek_jax.storage_path import storage_path
from launch import request, xla_flags
from launch.processes import Command
from launch.request import Given, Option
from launch.supervisor import supervise
from train.errors import Exit
from train.processes import AUTO

OPTIONS = {
  "--processes": Option(f"processes on this machine; {AUTO}: one, of a run that JAX finds", "1"),
  "--device": Option(
    f"kind of device, for XLA's flags: {', '.join(xla_flags.TABLE)}",
    "gpu if one is found, else cpu",
  ),
  "--slices": Option("slices of the run that this host is a part of, for XLA's flags", "1"),
}


def main(argv: Sequence[str]) -> int:
  """Runs and supervises. Returns the exit code of the run; raises UsageError."""
  gpus = _gpus()
  asked = request.parse(argv, OPTIONS, lambda given: _problems(given, gpus))
  processes = _processes(asked.options)
  kind = asked.options.get("--device") or ("gpu" if gpus else "cpu")
  slices = int(asked.options.get("--slices", "1"))
  chosen = xla_flags.flags(kind, devices=request.mesh_devices(asked.settings), slices=slices)
  carried = xla_flags.variables(chosen, os.environ)

  def told() -> list[dict[str, str]]:
    return [carried | own for own in process_variables(processes, gpus, _free_port())]

  command = asked.command(sys.executable)
  if asked.dry_run:
    print(_script(command, told(), xla_flags.describe(kind, chosen)))
    return Exit.DONE
  _say("\n".join(xla_flags.describe(kind, chosen)))
  return supervise(
    lambda: [Command(command, {**os.environ, **own}) for own in told()],
    newest_checkpoint=lambda: _newest_known(asked.workdir),
    report=_say,
  )


def process_variables(processes: int | None, gpus: int, port: int) -> list[dict[str, str]]:
  """What each process is told about the others; None processes: JAX finds it."""
  if processes is None:
    return [{"JAX_NUM_PROCESSES": AUTO}]
  if processes == 1:
    return [{}]
  share = gpus // processes
  return [
    {
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": str(processes),
      "JAX_PROCESS_ID": str(place),
    }
    | ({"JAX_LOCAL_DEVICE_IDS": _ids(place * share, share)} if share else {})
    for place in range(processes)
  ]


def newest_checkpoint(workdir: str) -> int | None:
  """Step of the newest complete checkpoint of a run folder."""
  steps = manifest.complete_steps(storage_path(workdir) / "checkpoints")
  return max(steps, default=None)


def _newest_known(workdir: str) -> int | None:
  try:
    return newest_checkpoint(workdir)
  except OSError as error:  # the run itself will say so, and may outlast it
    _say(f"{workdir} cannot be read: {error.strerror}.")
    return None


def _problems(given: Given, gpus: int) -> Iterator[str]:
  text = given.options.get("--processes") or "1"
  if text != AUTO and (not text.isdecimal() or int(text) == 0):
    yield f"--processes must be a positive integer or {AUTO}, got {text}."
  elif text != AUTO:
    if gpus % int(text):
      yield f"--processes {text} cannot share {gpus} GPUs equally."
    if given.settings and (devices := request.mesh_devices(given.settings)) % int(text):
      yield f"--processes {text} cannot share the {devices} devices of the mesh equally."
  kind = given.options.get("--device") or "cpu"
  if kind not in xla_flags.TABLE:
    yield f"--device must be one of {', '.join(xla_flags.TABLE)}, got {kind}."


def _processes(given: Mapping[str, str]) -> int | None:
  text = given.get("--processes", "1")
  return None if text == AUTO else int(text)


def _gpus() -> int:
  """NVIDIA GPUs that a process here would see; asked of the driver, for JAX would take them."""
  if not {"cuda", "gpu"} & set(os.environ.get("JAX_PLATFORMS", "cuda").split(",")):
    return 0
  if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
    return len([name for name in visible.split(",") if name])
  if shutil.which("nvidia-smi") is None:
    return 0
  listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
  return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _ids(first: int, count: int) -> str:
  return ",".join(map(str, range(first, first + count)))


def _free_port() -> int:
  """Free now; a start that finds it taken by then is a crash, and the next one asks again."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _script(
  command: Sequence[str], settings: Sequence[dict[str, str]], flags: Sequence[str]
) -> str:
  """The processes as a shell would start them; the supervisor is what it lacks."""
  lines = [f"# {line}" for line in flags]
  for variables in settings:
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    background = " &" if len(settings) > 1 else ""
    lines.append(f"{' '.join([*words, shlex.join(command)])}{background}")
  return "\n".join(lines + ["wait"] * (len(settings) > 1))


def _say(sentence: str) -> None:
  print(sentence, file=sys.stderr, flush=True)
