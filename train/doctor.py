"""`python -m train doctor`: what a run would find on this machine; exit 1 if a check fails.

Legend of the report: ok, FAIL, or - for a fact that nothing is required of.
"""

import importlib.metadata
import os
import pathlib
import platform
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from deepseek_jax.optim.frozen import frozen_names, is_frozen
from deepseek_jax.optim.partition import role_of
from deepseek_jax.sharding import make_mesh, slice_count
from deepseek_jax.storage_path import RemotePath, StoragePath, storage_path, write_atomically
from train import settings, stages
from train.errors import Exit, UsageError
from train.gradient_paths import unreached

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
USAGE = """python -m train doctor [--config FILE.py[:variant]] [--workdir DIR] [--config.K=V ...]

--config   also check that the configuration is sound, that its mesh fits the devices, and that the
           loss reaches every parameter that is not frozen, in every stage
--workdir  also check that files can be written, read and removed there; s3:// and gs:// too"""


class Finding(NamedTuple):
  state: str  # "ok", "FAIL" or "-"
  subject: str
  text: str


def main(argv: Sequence[str]) -> int:
  """Prints the report. Returns 0, 1 if a check failed; raises UsageError for wrong arguments."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE)
    return Exit.DONE
  arguments = settings.split(argv)
  if arguments.problems:
    raise UsageError(arguments.problems)
  findings = [*_versions(), *_devices(), *_flags()]
  if "--workdir" in arguments.values:
    findings.append(_storage(arguments.values["--workdir"]))
  if "--config" in arguments.values or arguments.overrides:
    findings += _configuration(arguments)
  for finding in findings:
    print(f"{finding.state:4}  {finding.subject:16}  {finding.text}")
  return Exit.CHECK_FAILED if any(f.state == "FAIL" for f in findings) else Exit.DONE


def _versions() -> Iterator[Finding]:
  yield Finding("-", "python", platform.python_version())
  for package in PACKAGES:
    yield Finding("-", package, importlib.metadata.version(package))


def _devices() -> Iterator[Finding]:
  try:
    devices = jax.devices()
  except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not there
    yield Finding("FAIL", "devices", str(error).splitlines()[0])
    return
  kinds = sorted({device.device_kind for device in devices})
  yield Finding("ok", "devices", f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform})")
  memory = (devices[0].memory_stats() or {}).get("bytes_limit")
  if memory:
    yield Finding("-", "device memory", f"{memory / 2**30:.1f} GiB each")


def _flags() -> Iterator[Finding]:
  for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR"):
    yield Finding("-", name.lower(), os.environ.get(name, "not set"))


def _storage(workdir: str) -> Finding:
  """Writes, reads and removes a file, the way a run would; a store must also keep conditions."""
  folder = storage_path(workdir)
  probe = folder / f".doctor-{uuid.uuid4().hex}"
  fault = None
  try:
    if isinstance(folder, pathlib.Path):
      folder.mkdir(parents=True, exist_ok=True)
    write_atomically(probe, b"written")
    if probe.read_bytes() != b"written":
      fault = "gives back other bytes than were written"
    elif isinstance(probe, RemotePath):
      fault = _store_fault(folder, probe)
    probe.unlink()
  except OSError as error:
    return Finding("FAIL", "storage", f"{workdir} cannot be written: {error.strerror}.")
  if fault:
    return Finding("FAIL", "storage", f"{workdir} {fault}.")
  return Finding("ok", "storage", f"{workdir} can be written, read and cleaned")


def _store_fault(folder: StoragePath, probe: RemotePath) -> str | None:
  """What a store that reads and writes lacks for a run folder."""
  _, generation = probe.read_versioned()
  if probe.create_if_absent(b"new") is None and probe.write_if_unchanged(b"again", generation):
    if probe.write_if_unchanged(b"once more", generation):
      return "overwrites an object that has changed, so that two runs could have one folder"
  else:
    return "does not write on conditions, which is how a run has a folder for itself"
  if isinstance(folder, RemotePath) and folder.names_below(probe.name) != [probe.name]:
    return "does not list what was written"
  return None


def _configuration(arguments: settings.Arguments) -> Iterator[Finding]:
  argv = [f"{settings.OVERRIDE}{key}={text}" for key, text in arguments.overrides.items()]
  argv += [f"{name}={value}" for name, value in arguments.values.items()]
  if "--workdir" not in arguments.values:
    argv.append("--workdir=.")
  try:
    devices = jax.devices()
    parsed = settings.parse(argv, devices=len(devices), slices=slice_count(devices))
  except UsageError as error:
    yield from (Finding("FAIL", "configuration", problem) for problem in error.problems)
    return
  yield Finding("ok", "configuration", f"{arguments.values['--config']} is sound")
  plan = stages.resolve(parsed.settings)
  for stage in plan:
    where = "" if stage is plan[0] else f":{stage.name}"
    mesh = make_mesh(stage.settings.mesh)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    yield Finding("ok", f"mesh{where}", axes)
    with jax.set_mesh(mesh):
      names = unreached(stage.settings, mesh, [part.span for part in plan])
    yield _gradients(names, frozen_names(stage.settings.optim), f"gradients{where}")


def _gradients(names: Sequence[str], frozen: Sequence[str], subject: str) -> Finding:
  """Whether the loss reaches every parameter that trains; lists those that it does not reach."""
  roles: dict[str, list[str]] = {}
  for name in names:
    roles.setdefault(role_of(name), []).append(name)
  listed = lambda keys: ", ".join(
    roles[key][0] if len(roles[key]) == 1 else f"{key} ({len(roles[key])} times)" for key in keys
  )
  still = [key for key in roles if is_frozen(key, frozen)]
  forgotten = [key for key in roles if key not in still]
  if forgotten:
    text = f"none reaches {listed(forgotten)}; optim.frozen does not name what may stay as it is."
    return Finding("FAIL", subject, text)
  if still:
    return Finding("ok", subject, f"reach every parameter but the frozen {listed(still)}")
  return Finding("ok", subject, "reach every parameter")
