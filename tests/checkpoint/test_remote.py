"""Checkpoints in an S3 store: nothing counts before its manifest, wherever the writer is killed.

The process that is killed is this file: `python tests/checkpoint/test_remote.py URL MOMENT`.
"""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deepseek_jax.checkpoint import (
  CheckpointError,
  Checkpoints,
  remote_storage,
  restore_step,
  verify_step,
)
from deepseek_jax.checkpoint import manifest as manifest_file
from deepseek_jax.storage_path import RemotePath, storage_path

ROOT = pathlib.Path(__file__).parents[2]


def state(scale=1.0, *specs):
  """Leaves of several types, cut along the axes of a mesh of 4 x 2."""
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
  w, bias = specs or (("a", "b"), (("a", "b"),))
  return {
    "params": {
      "w": put(scale * jnp.arange(64.0).reshape(8, 8), *w),
      "half": put(jnp.full((8, 3), scale, jnp.bfloat16), "b"),
      "deep": {"bias": put(jnp.arange(8, dtype=jnp.int32), *bias), "zero": put(jnp.zeros(3))},
      "scalar": put(jnp.float32(scale)),
    },
    "router": {},
  }


def abstract(items):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items)


def assert_same(found, wanted):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype and a.sharding == b.sharding
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def save(url, *steps, keep_last=3):
  checkpoints = Checkpoints(url, keep_last=keep_last)
  for step in steps:
    checkpoints.save(step, state(step), data={"next": step}, meta={})
  assert checkpoints.wait() == max(steps)
  checkpoints.close()


def test_what_was_saved_comes_back_on_another_mesh(s3):
  save(f"{s3}/run", 1, 2)
  other = state(2, (None, ("a", "b")), (None,))
  found = Checkpoints(f"{s3}/run").restore(abstract(other))
  assert_same(found.items, other)
  assert (found.step, found.data, found.meta) == (2, {"next": 2}, {"step": 2})
  assert_same(restore_step(f"{s3}/run/1", abstract(state(1))).items, state(1))


def test_a_step_that_was_copied_to_a_folder_is_read_there_and_damage_is_noticed(s3, tmp_path):
  save(f"{s3}/run", 1)
  remote, local = storage_path(f"{s3}/run/1"), tmp_path / "1"
  for name in remote.names_below():
    (local / name).parent.mkdir(parents=True, exist_ok=True)
    (local / name).write_bytes((remote / name).read_bytes())
  other = state(1, (None, ("a", "b")), (None,))
  assert_same(restore_step(local, abstract(other)).items, other)
  chunk = next(path for path in (local / "params" / "w" / "c").rglob("*") if path.is_file())
  chunk.write_bytes(bytes(reversed(chunk.read_bytes())))
  with pytest.raises(CheckpointError, match="differs from its SHA-256"):
    restore_step(local, abstract(other))
  with pytest.raises(CheckpointError, match=f"{local} cannot be read: .*[Dd]igest mismatch"):
    restore_step(local, abstract(other), verify=False)


def test_arrays_may_be_donated_as_soon_as_save_returns(s3):
  items = state(3)
  checkpoints = Checkpoints(f"{s3}/run")
  checkpoints.save(3, items, data={}, meta={})
  jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(items)
  checkpoints.wait()
  assert_same(checkpoints.restore(abstract(state(3))).items, state(3))


def test_large_shards_are_cut_into_several_objects(s3, monkeypatch):
  monkeypatch.setattr(remote_storage, "CHUNK_BYTES", 16)
  save(f"{s3}/run", 1)
  names = storage_path(f"{s3}/run/1/params/w").names_below()
  assert len(names) == 1 + 64 // 4
  assert_same(restore_step(f"{s3}/run/1", abstract(state(1))).items, state(1))


def test_old_steps_go_and_leave_no_object(s3):
  save(f"{s3}/run", 1, 2, 3, 4, keep_last=2)
  names = storage_path(f"{s3}/run").names_below()
  assert {name.partition("/")[0] for name in names} == {"3", "4"}


def test_a_flipped_bit_sends_the_run_back_to_the_step_before(s3):
  save(f"{s3}/run", 1, 2)
  chunk = storage_path(f"{s3}/run/2/params/w/c/0/0")
  data = bytearray(chunk.read_bytes())
  data[5] ^= 1
  chunk.write_bytes(bytes(data))
  assert verify_step(f"{s3}/run/2") == ["params/w/c/0/0 differs from its SHA-256"]
  said = []
  checkpoints = Checkpoints(f"{s3}/run", report=said.append)
  assert checkpoints.restore(abstract(state())).step == 1
  assert said == [
    "Checkpoint 2 is damaged (params/w/c/0/0 differs from its SHA-256); it was set aside as "
    "2/manifest.damaged-1.json."
  ]
  checkpoints.save(2, state(7), data={}, meta={})
  checkpoints.wait()
  assert_same(restore_step(f"{s3}/run/2", abstract(state(7))).items, state(7))
  assert verify_step(f"{s3}/run/2") == []


def test_a_run_whose_steps_are_all_damaged_does_not_start_over(s3):
  save(f"{s3}/run", 1)
  storage_path(f"{s3}/run/1/manifest.json").write_bytes(b"{}")
  with pytest.raises(CheckpointError, match="No usable checkpoint is left in s3://.*/run"):
    Checkpoints(f"{s3}/run", report=lambda _: None).restore(abstract(state()))
  with pytest.raises(CheckpointError, match="No usable checkpoint is left"):
    Checkpoints(f"{s3}/run", report=lambda _: None).restore(abstract(state()))


def test_another_shape_is_refused_by_name(s3):
  save(f"{s3}/run", 1)
  wanted = abstract(state())
  wanted["params"]["scalar"] = jax.ShapeDtypeStruct((2,), jnp.float32)
  with pytest.raises(
    CheckpointError, match=r"scalar is float32\[\] in the checkpoint and float32\[2"
  ):
    Checkpoints(f"{s3}/run").restore(wanted)


@pytest.mark.slow
def test_a_store_that_goes_away_fails_the_save_with_a_sentence(s3, monkeypatch):
  checkpoints = Checkpoints(f"{s3}/run")
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  checkpoints.save(1, state(), data={}, meta={})
  with pytest.raises(CheckpointError) as error:
    checkpoints.wait()
  assert str(error.value).startswith(
    f"Checkpoint 1 could not be saved in {s3}/run: http://127.0.0.1:9 cannot be reached"
  )


MOMENTS = {
  "between two arrays": (remote_storage, "_create", 3),
  "between two documents": (RemotePath, "write_bytes", 3),
  "before the manifest": (manifest_file, "write_manifest", 1),
  "while an old step is removed": (RemotePath, "remove_tree", 2),
}
LEFT = {"while an old step is removed": [2]}  # complete steps; elsewhere [1]


def die_at(moment):
  """Makes the process kill itself at the n-th call of a function, counted from the second save."""
  place, name, calls = MOMENTS[moment]
  original, count = getattr(place, name), [0]

  def dying(*args, **kwargs):
    count[0] += 1
    if count[0] == calls:
      os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

  setattr(place, name, dying)


def save_and_die(url, moment):
  checkpoints = Checkpoints(url, keep_last=1)
  checkpoints.save(1, state(1), data={"next": 1}, meta={})
  checkpoints.wait()
  die_at(moment)
  checkpoints.save(2, state(2), data={"next": 2}, meta={})
  checkpoints.wait()


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_killed_between_two_objects_leaves_nothing_that_counts(s3, moment):
  process = subprocess.run(
    [sys.executable, __file__, f"{s3}/run", moment],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  assert process.returncode == -signal.SIGKILL, process.stderr
  left = LEFT.get(moment, [1])
  assert manifest_file.complete_steps(storage_path(f"{s3}/run")) == left
  said = []
  found = Checkpoints(f"{s3}/run", report=said.append).restore(abstract(state()))
  assert_same(found.items, state(left[0]))
  gone = 3 - left[0]
  assert said == [f"Removed {gone}, which an interrupted run left in {s3}/run."]
  assert {name.partition("/")[0] for name in storage_path(f"{s3}/run").names_below()} == {
    str(left[0])
  }


if __name__ == "__main__":
  save_and_die(sys.argv[1], sys.argv[2])
