"""Processes of one run on this machine, and the smallest model that they can share."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

from tests.conftest import QUICK_XLA

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICES = 4  # of every run, over all its processes
PATIENCE = 400  # seconds for processes that compile on a busy machine
# Two layers: these runs are about processes.
MODEL = {
  "model__compress_ratios": "(0,1)",
  "model__kv_sources": "(1,)",
  "model__index_sources": "(1,)",
  "model__decoder_start": 1,
  "model__indexer__pool_source": 1,
  "model__engram__layers": "(1,)",
  "model__engram__table_rows": "(420,)",
}


def environment(count, place=None, port=None, devices=DEVICES):
  """Of one of `count` processes that share the devices."""
  own = f"--xla_force_host_platform_device_count={devices // count}"
  found = os.environ | {"XLA_FLAGS": f"{own} {QUICK_XLA}", "PYTHONPATH": str(ROOT)}
  if place is None:
    return found
  told = {"JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": place}
  told["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
  return found | {name: str(value) for name, value in told.items()}


def free_port():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


class Together:
  """As many processes as there are command lines; each ends with its group at the end of a test."""

  def __init__(self, folder, *commands, devices=DEVICES):
    folder.mkdir(parents=True, exist_ok=True)
    count, port = len(commands), free_port()
    self._outputs = [folder / f"output{place}" for place in range(count)]
    self.processes = []
    for place, words in enumerate(commands):
      told = environment(count, *((place, port) if count > 1 else ()), devices=devices)
      with open(self._outputs[place], "w") as output:
        self.processes.append(
          subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            env=told,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
          )
        )

  def __enter__(self):
    return self

  def __exit__(self, *error):
    for process in self.processes:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

  def finish(self):
    """Exit codes, in order of place."""
    return [process.wait(PATIENCE) for process in self.processes]

  @property
  def outputs(self):
    """What each has printed, without the greetings of JAX's network library."""
    found = [path.read_text().splitlines() for path in self._outputs]
    return [[line for line in lines if not line.startswith("[Gloo]")] for lines in found]


def run(folder, count, command, devices=DEVICES):
  """Runs `count` processes with the same command to their end: exit codes and outputs."""
  with Together(folder, *[command] * count, devices=devices) as together:
    return together.finish(), together.outputs
