"""What a run ran on: `environment.json`. Names of variables are chosen, so no secret is stored."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax

PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "tensorstore",
  "grain",
  "array-record",
  "tokenizers",
  "numpy",
)
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")  # what changes compiled programs


def environment() -> dict[str, Any]:
  """JSON-able: versions, git revision, devices, processes, XLA flags, arguments."""
  devices = jax.devices()
  return {
    "versions": {"python": platform.python_version(), **_versions()},
    "git": _git(pathlib.Path(__file__).resolve().parent),
    "devices": {"kind": devices[0].device_kind, "count": len(devices)},
    "processes": jax.process_count(),
    "variables": {name: os.environ.get(name, "") for name in VARIABLES},
    "platform": platform.platform(),
    "arguments": sys.argv[1:],
  }


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
  """One sentence per difference that may change the bits of a continued run."""
  sentences = []
  for section in ("versions", "devices", "variables"):
    old, new = before.get(section) or {}, now[section]
    sentences += [
      f"{name} was {old.get(name)} and is now {new.get(name)}."
      for name in new
      if old.get(name) != new[name]
    ]
  return sentences


def _versions() -> dict[str, str | None]:
  installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
  by_name = {name.lower().replace("_", "-"): version for name, version in installed.items()}
  return {name: by_name.get(name) for name in PACKAGES}


def _git(folder: pathlib.Path) -> dict[str, Any]:
  """Revision and whether files differ from it; None outside a repository or without git."""

  def git(*arguments: str) -> str | None:
    try:
      done = subprocess.run(
        ["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=10
      )
    except (OSError, subprocess.SubprocessError):
      return None
    return done.stdout.strip()

  status = git("status", "--porcelain")
  return {
    "revision": git("rev-parse", "HEAD"),
    "changed_files": None if status is None else bool(status),
  }
