"""Tests run on eight host devices of the CPU and share one compilation cache; so do the processes
that they start, for all of it is in the environment. JAX is not imported here."""

import os
import pathlib
import subprocess
import sys
import urllib.request
import uuid

import pytest

CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"
COUNT = "--xla_force_host_platform_device_count"  # processes that tests start have their own
# Most of the tests' time is XLA's: without its slow passes a program compiles in two thirds of the
# processor time, and the programs of tests are too small to run noticeably slower.
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

os.environ["JAX_PLATFORMS"] = "cpu"
if COUNT not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COUNT}=8 {QUICK_XLA}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# A bound on the cache turns on its file lock: no process reads an entry that another is writing.
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(4 * 2**30))

# Prints its port and lives until its input ends, as it does when this process does.
S3_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_server():
  """Address of an S3 server, in a process of its own."""
  with subprocess.Popen(
    [sys.executable, "-W", "ignore", "-c", S3_SERVER],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as server:
    yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    server.stdin.close()


@pytest.fixture
def s3(s3_server, tmp_path, monkeypatch):
  """URL of an empty bucket, for this process and those that it starts."""
  name = f"b{uuid.uuid4().hex}"
  request = urllib.request.Request(f"{s3_server}/{name}", method="PUT")
  urllib.request.urlopen(request).close()
  monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
  monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
  monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
  monkeypatch.setenv("DEEPSEEK_JAX_CACHE", str(tmp_path / "cache"))
  return f"s3://{name}"
