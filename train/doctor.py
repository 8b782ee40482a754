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

from deepseek_jax.sharding import make_mesh
from train import settings
from train.errors import Exit, UsageError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
USAGE = """python -m train doctor [--config FILE.py[:variant]] [--workdir DIR] [--config.K=V ...]

--config   also check that the configuration is sound and that its mesh fits the devices
--workdir  also check that files can be written, read and removed there"""


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
  """Writes, reads and removes a file, the way a checkpoint would."""
  folder = pathlib.Path(workdir)
  probe = folder / f".doctor-{uuid.uuid4().hex}"
  try:
    folder.mkdir(parents=True, exist_ok=True)
    probe.write_text("written")
    read = probe.read_text()
    probe.unlink()
  except OSError as error:
    return Finding("FAIL", "storage", f"{workdir} cannot be written: {error.strerror}.")
  if read != "written":
    return Finding("FAIL", "storage", f"{workdir} gives back other bytes than were written.")
  return Finding("ok", "storage", f"{workdir} can be written, read and cleaned")


def _configuration(arguments: settings.Arguments) -> Iterator[Finding]:
  argv = [f"{settings.OVERRIDE}{key}={text}" for key, text in arguments.overrides.items()]
  argv += [f"{name}={value}" for name, value in arguments.values.items()]
  if "--workdir" not in arguments.values:
    argv.append("--workdir=.")
  try:
    parsed = settings.parse(argv, devices=jax.device_count())
  except UsageError as error:
    yield from (Finding("FAIL", "configuration", problem) for problem in error.problems)
    return
  mesh = make_mesh(parsed.settings.mesh)
  axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
  yield Finding("ok", "configuration", f"{arguments.values['--config']} is sound")
  yield Finding("ok", "mesh", axes)
