"""A step made while it is written: every element once, in parts that stay small."""

import math
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepseek_jax.checkpoint import CheckpointError, restore_step, verify_step
from deepseek_jax.checkpoint.stored_arrays import chunk_shape, open_items
from deepseek_jax.checkpoint.streamed import _CHUNK_BYTES, Unmade, _own_parts, write_step


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh((4, 2), ("fsdp", "expert"))


def unmade(mesh, shape, axes, *, lead=0, by_rows=False, read=None):
  sharding = NamedSharding(mesh, PartitionSpec(*axes))
  values = lambda: np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
  take = read or (lambda index: np.ascontiguousarray(values()[index]))
  return Unmade(shape, np.dtype(np.float32), sharding, take, lead=lead, by_rows=by_rows)


CASES = {
  "experts of a group of layers": ((2, 8, 4, 16), (None, "expert", "fsdp"), {"lead": 2}),
  "matrix": ((8, 6), (None, "expert"), {}),
  "table": ((24, 4), (("fsdp", "expert"),), {"by_rows": True}),
  "vector on all devices": ((5,), (), {"by_rows": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_cover_every_element_once(mesh, name):
  shape, axes, options = CASES[name]
  value = unmade(mesh, shape, axes, **options)
  seen = np.zeros(shape, int)
  for index in _own_parts(value, (1,) * len(shape)):
    seen[index] += 1
  assert (seen == 1).all()


def test_a_part_is_a_matrix_of_a_stack_or_a_block_of_a_table(mesh):
  stack = unmade(mesh, (4, 384, 5120, 2304), (None, "expert"), lead=2)
  parts = list(_own_parts(stack, (1, 1, 5120, 2304)))
  assert len(parts) == 4 * 384
  assert {tuple(s.stop - s.start for s in part) for part in parts} == {(1, 1, 5120, 2304)}
  table = unmade(mesh, (384_016_688, 256), ("fsdp",), by_rows=True)
  chunk = 1 << 16
  rows = [part[0] for part in _own_parts(table, (chunk, 256))]
  assert max(part.stop - part.start for part in rows) * 256 * 4 <= _CHUNK_BYTES
  shard = 384_016_688 // 4
  assert all((part.start % shard) % chunk == 0 for part in rows)  # no chunk is written twice


def test_what_is_written_is_restored_and_read_in_parts(mesh, tmp_path):
  items = {"params": {name.replace(" ", "_"): unmade(mesh, shape, axes, **options)
                      for name, (shape, axes, options) in CASES.items()}}  # fmt: skip
  write_step(tmp_path / "0", items, {"data": {}, "meta": {"step": 0}})
  assert verify_step(tmp_path / "0") == []
  arrays = open_items(tmp_path / "0")["params"]
  assert chunk_shape(arrays["experts_of_a_group_of_layers"])[:2] == (1, 1)
  wanted = {
    name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    for name, value in items["params"].items()
  }
  found = restore_step(tmp_path / "0", {"params": wanted}).items["params"]
  for name, value in items["params"].items():
    whole = value.read(tuple(map(slice, value.shape)))
    np.testing.assert_array_equal(arrays[name].read().result(), whole, name)
    np.testing.assert_array_equal(found[name], whole, name)


def test_an_error_on_the_way_is_raised_after_the_last_write(mesh, tmp_path):
  def fails(index):
    raise CheckpointError("a bad scale")

  items = {"params": {"a": unmade(mesh, (64, 64), ()), "b": unmade(mesh, (4,), (), read=fails)}}
  with pytest.raises(CheckpointError, match="^a bad scale$"):
    write_step(tmp_path / "0", items, {"meta": {}})
  assert not (tmp_path / "0").exists()
  shutil.rmtree(tmp_path / "0.orbax-checkpoint-tmp")  # nothing makes it again
  assert list(tmp_path.iterdir()) == []
