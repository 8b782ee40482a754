"""A save that fails is noticed, leaves nothing behind, and older steps stay good.

The process whose output a test reads is this file: `python tests/checkpoint/test_failed_save.py F`.
"""

import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from tests.full_disk import no_file_above

ROOT = pathlib.Path(__file__).parents[2]
ON_ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SMALL, LARGE = 1 << 10, 1 << 21  # float32 numbers


def items(size):
  return {"params": {"w": jax.random.normal(jax.random.key(0), (size,))}}


def abstract(size):
  return {"params": {"w": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=ON_ONE)}}


def save_until_noticed(checkpoints, step, seconds=10.0):
  """Saves more than fits, and polls as a run does at every step."""
  checkpoints.save(step, items(LARGE), data={}, meta={})
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline:
    checkpoints.poll()
    time.sleep(0.01)


def test_a_failed_save_stops_the_run_in_one_sentence_and_older_steps_survive(tmp_path, caplog):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, items(SMALL), data={}, meta={})
  checkpoints.wait()
  with no_file_above(1 << 16), pytest.raises(CheckpointError) as error:
    save_until_noticed(checkpoints, step=2)
  assert str(error.value).startswith(
    f"Checkpoint 2 could not be saved in {tmp_path}: File too large (it needs about 8.4 MB, "
  )
  assert "Traceback" not in caplog.text
  assert [path.name for path in tmp_path.iterdir()] == ["1"]
  np.testing.assert_array_equal(
    checkpoints.restore(abstract(SMALL)).items["params"]["w"], items(SMALL)["params"]["w"]
  )
  checkpoints.close()


def fail_with_many_writes_in_flight(folder):
  """Saves items of many arrays, so that most writes are under way when the first of them fails."""
  arrays = {f"w{n}": jax.random.normal(jax.random.key(n), (1 << 16,)) for n in range(100)}
  checkpoints = Checkpoints(folder)
  with no_file_above(1 << 16):
    checkpoints.save(1, {"params": arrays, "optimizer": arrays}, data={}, meta={})
    try:
      checkpoints.wait()
    except CheckpointError as error:
      print(error)
  checkpoints.close()


def test_a_failed_save_prints_no_tracebacks_of_the_writes_beside_it(tmp_path):
  process = subprocess.run(
    [sys.executable, __file__, str(tmp_path)],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert process.stdout.startswith("Checkpoint 1 could not be saved")
  assert len(process.stderr.splitlines()) < 20, process.stderr[:2000]
  assert list(tmp_path.iterdir()) == []


def test_with_continue_the_next_save_tries_again(tmp_path):
  sentences = []
  checkpoints = Checkpoints(tmp_path, on_error="continue", report=sentences.append)
  with no_file_above(1 << 16):
    checkpoints.save(1, items(LARGE), data={}, meta={})
    assert checkpoints.wait() is None
  assert len(sentences) == 1 and sentences[0].endswith("The next save tries again.")
  checkpoints.save(1, items(LARGE), data={}, meta={})
  assert checkpoints.wait() == 1
  checkpoints.close()


def test_a_failure_not_yet_polled_is_raised_by_the_next_save(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  with no_file_above(1 << 16):
    checkpoints.save(1, items(LARGE), data={}, meta={})
    with pytest.raises(CheckpointError, match="Checkpoint 1 could not"):
      checkpoints.save(2, items(SMALL), data={}, meta={})
  checkpoints.save(2, items(SMALL), data={}, meta={})
  assert checkpoints.wait() == 2
  checkpoints.close()


def test_a_folder_that_vanished_is_one_sentence(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  (tmp_path / "checkpoints").rmdir()
  with pytest.raises(CheckpointError, match="could not be saved .*: No such file or directory"):
    checkpoints.save(1, items(SMALL), data={}, meta={})
  checkpoints.close()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(CheckpointError, match="checkpoint folder .* cannot be used: Not a directory"):
    Checkpoints(tmp_path / "file" / "checkpoints")


def test_a_full_disk_is_named_with_the_space_it_has(tmp_path):
  mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
  if subprocess.run(mount, capture_output=True, check=False).returncode:
    pytest.skip("mounting a file system needs root")
  try:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, items(SMALL), data={}, meta={})
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"No space left on device \(it needs about 8.4 MB"):
      save_until_noticed(checkpoints, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoints.restore(abstract(SMALL)).step == 1
    checkpoints.close()
  finally:
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


if __name__ == "__main__":
  fail_with_many_writes_in_flight(pathlib.Path(sys.argv[1]))
