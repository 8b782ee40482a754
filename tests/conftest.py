"""Tests run on eight host devices of the CPU and share one compilation cache; so do the processes
that they start, for all of it is in the environment. JAX is not imported here."""

import os
import pathlib

CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"
DEVICES = "--xla_force_host_platform_device_count=8"

os.environ["JAX_PLATFORMS"] = "cpu"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# A bound on the cache turns on its file lock: no process reads an entry that another is writing.
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(4 * 2**30))
