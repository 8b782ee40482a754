"""Two processes write one checkpoint, which two processes, or one, read.

Each process is this file: `python test_two_processes.py FOLDER save|restore INDEX COUNT PORT`.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepseek_jax.checkpoint import Checkpoints, verify_step
from deepseek_jax.storage_path import storage_path

ROOT = pathlib.Path(__file__).parents[2]
STEPS = (1, 2, 3)


def work(folder: str, verb: str) -> None:
  """Prints what was restored; exits with 1 if it is not what was saved."""
  everything = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
  sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("fsdp",)), P("fsdp"))
  w = jax.make_array_from_callback(everything.shape, sharding, lambda index: everything[index])
  checkpoints = Checkpoints(folder, keep_last=2, report=print)
  if verb == "save":
    for step in STEPS:
      checkpoints.save(step, {"params": {"w": w}}, data={"next": step}, meta={})
      checkpoints.poll()
    checkpoints.save(STEPS[-1], {"params": {"w": w}}, data={}, meta={})  # once more, at the end
    checkpoints.wait()
  else:
    wanted = {"params": {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)}}
    found = checkpoints.restore(wanted)
    assert found is not None
    for shard in found.items["params"]["w"].addressable_shards:
      np.testing.assert_array_equal(np.asarray(shard.data), everything[shard.index])
    print(f"restored {found.step} {found.data}")
  checkpoints.close()


def together(
  folder: pathlib.Path, verb: str, count: int, checkpoints: str | None = None
) -> list[str]:
  """Runs the processes and returns what each printed; their output is in the folder."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  processes = []
  for index in range(count):
    where = checkpoints or str(folder / "checkpoints")
    arguments = [where, verb, str(index), str(count), str(port)]
    with open(folder / f"output{index}", "w") as output:
      process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    processes.append(process)
  try:
    codes = [process.wait(60) for process in processes]
  finally:
    for process in processes:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
  printed = [(folder / f"output{index}").read_text() for index in range(count)]
  assert codes == [0] * count, "\n".join(printed)
  return printed


@pytest.mark.slow
def test_what_two_processes_saved_two_and_one_restore(tmp_path):
  together(tmp_path, "save", 2)
  assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "3"}
  data = tmp_path / "checkpoints" / "3" / "data" / "metadata"
  data.write_text(data.read_text().replace("3", "7"))
  first, second = together(tmp_path, "restore", 2)
  assert "Checkpoint 3 is damaged (data/metadata differs from its SHA-256)" in first
  for printed in (first, second, *together(tmp_path, "restore", 1)):
    assert "restored 2 {'next': 2}" in printed


@pytest.mark.slow
def test_two_processes_share_the_work_on_a_step_in_a_store(tmp_path, s3):
  url = f"{s3}/run"
  together(tmp_path, "save", 2, url)
  names = storage_path(url).names_below()
  assert {name.partition("/")[0] for name in names} == {"2", "3"}
  assert not [name for name in names if "/parts/" in name]
  assert verify_step(f"{url}/2") == verify_step(f"{url}/3") == []
  storage_path(f"{url}/3/data.json").write_bytes(b"{}")
  first, second = together(tmp_path, "restore", 2, url)
  assert "Checkpoint 3 is damaged (data.json has 2 bytes instead of 11)" in first
  for printed in (first, second, *together(tmp_path, "restore", 1, url)):
    assert "restored 2 {'next': 2}" in printed


if __name__ == "__main__":
  _folder, _verb, _index, _count, _port = sys.argv[1:]
  if int(_count) > 1:
    jax.distributed.initialize(f"127.0.0.1:{_port}", int(_count), int(_index))
  work(_folder, _verb)
  if int(_count) > 1:
    jax.distributed.shutdown()
