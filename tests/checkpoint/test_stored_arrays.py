"""Arrays of a saved step are described and read in parts, wherever the step is."""

import jax
import numpy as np
import pytest

from deepseek_jax.checkpoint import CheckpointError, Checkpoints
from deepseek_jax.checkpoint.stored_arrays import open_items
from deepseek_jax.storage_path import storage_path

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("place", ["local", pytest.param("store", marks=pytest.mark.slow)])
def test_a_part_of_an_array_is_that_part_of_what_was_saved(place, tmp_path, request):
  url = str(tmp_path) if place == "local" else f"{request.getfixturevalue('s3')}/run"
  mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
  cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  checkpoints = Checkpoints(url)
  items = {
    "params": {"a": {"b": jax.device_put(VALUES, cut)}, "c": jax.numpy.ones(3)},
    "router": {"d": jax.numpy.zeros(2)},
  }
  checkpoints.save(1, items, data={}, meta={})
  checkpoints.close()
  found = open_items(storage_path(f"{url}/1"))
  assert {item: set(arrays) for item, arrays in found.items()} == {
    "params": {"a/b", "c"}, "router": {"d"}
  }  # fmt: skip
  array = found["params"]["a/b"]
  assert array.shape == (4, 6) and array.dtype.numpy_dtype == np.float32
  np.testing.assert_array_equal(array[1:3, 2].read().result(), VALUES[1:3, 2])


def test_a_folder_that_holds_no_step_is_an_error(tmp_path):
  with pytest.raises(CheckpointError, match="cannot be read"):
    open_items(tmp_path / "nothing")
