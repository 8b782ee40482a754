"""SIGKILL at any moment of a save leaves a step that can be restored, and nothing half written.

The process that is killed is this file: `python tests/checkpoint/test_kill.py FOLDER`.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
LARGE = 1 << 22  # float32 numbers: a save that takes about a quarter of a second
ON_ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def state(scale: float):
  key = jax.random.key(0)
  return {"params": {"w": scale * jax.random.normal(key, (LARGE,)), "b": jnp.full(3, scale)}}


def save_twice(folder: pathlib.Path) -> None:
  """Touches FOLDER/saving when the second save begins and FOLDER/saved when it is complete."""
  checkpoints = Checkpoints(folder / "checkpoints")
  checkpoints.save(1, state(1.0), data={"next": 1}, meta={})
  checkpoints.wait()
  items = jax.block_until_ready(state(2.0))
  (folder / "saving").touch()
  checkpoints.save(2, items, data={"next": 2}, meta={})
  checkpoints.wait()
  (folder / "saved").touch()
  time.sleep(60)


def start(folder: pathlib.Path) -> subprocess.Popen:
  """The child, in a process group of its own, its output in a file."""
  with open(folder / "output", "w") as output:
    return subprocess.Popen(
      [sys.executable, __file__, str(folder)],
      env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )


def wait_for(path: pathlib.Path, seconds: float = 60.0) -> None:
  deadline = time.monotonic() + seconds
  while not path.exists():
    assert time.monotonic() < deadline, (path.parent / "output").read_text()
    time.sleep(0.001)


def kill(process: subprocess.Popen) -> None:
  os.killpg(process.pid, signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.25])
def test_killed_while_saving_restores_the_older_or_the_whole_newer_step(tmp_path, delay):
  process = start(tmp_path)
  try:
    wait_for(tmp_path / "saving")
    time.sleep(delay)
  finally:
    kill(process)
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  params = {
    "w": jax.ShapeDtypeStruct((LARGE,), jnp.float32, sharding=ON_ONE),
    "b": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=ON_ONE),
  }
  found = checkpoints.restore({"params": params})
  checkpoints.close()
  assert found.data == {"next": found.step} and found.step in (1, 2)
  for name, want in state(float(found.step))["params"].items():
    np.testing.assert_array_equal(found.items["params"][name], want)
  left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
  assert left <= {"1", "2", "2.unfinished-1"}


@pytest.mark.slow
def test_killed_after_the_save_restores_the_newer_step(tmp_path):
  process = start(tmp_path)
  try:
    wait_for(tmp_path / "saved")
  finally:
    kill(process)
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  assert checkpoints.steps() == [1, 2]
  checkpoints.close()


if __name__ == "__main__":
  save_twice(pathlib.Path(sys.argv[1]))
