"""Saving and restoring: exact, onto any mesh, asynchronous, pruned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepseek_jax.checkpoint import CheckpointError, Checkpoints, restore_step
from deepseek_jax.checkpoint.retention import expendable

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.bfloat16))


def mesh(*shape):
  count = int(np.prod(shape))
  return Mesh(np.asarray(jax.devices()[:count]).reshape(shape), ("fsdp", "tensor"))


def placed(tree, on):
  """Matrices split over both axes, the rest replicated."""
  spec = lambda leaf: P("fsdp", "tensor") if leaf.ndim == 2 else P()
  return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(on, spec(leaf))), tree)


def abstract(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def state(seed=0, on=None):
  """Float32 and bfloat16 leaves, empty nodes, tuples, and an item without leaves."""
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    "layers_0_1": {"q": jax.random.normal(keys[0], (16, 24)), "norm": jnp.ones(24)},
    "head": jax.random.normal(keys[1], (8, 32), jnp.bfloat16),
  }
  gradients = jax.tree.map(lambda x: jax.random.normal(keys[2], x.shape, x.dtype), params)
  _, optimizer = OPTIMIZER.update(gradients, OPTIMIZER.init(params), params)
  items = {"params": params, "optimizer": optimizer, "router": {}}
  return placed(items, on or mesh(1, 1))


def assert_identical(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def checkpoints(tmp_path):
  manager = Checkpoints(tmp_path, keep_last=2)
  yield manager
  manager.close()


def test_restored_state_is_the_saved_state_with_its_documents(checkpoints):
  items = state()
  checkpoints.save(7, items, data={"next": [1, 2]}, meta={"tokens": 5})
  found = checkpoints.restore(abstract(items))
  assert_identical(found.items, items)
  assert (found.step, found.data) == (7, {"next": [1, 2]})
  assert found.meta == {"tokens": 5, "step": 7}


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 1)], ids=str)
def test_restores_bit_for_bit_onto_another_mesh(checkpoints, shape):
  saved = state(on=mesh(8, 1))
  wanted = abstract(placed(state(seed=1), mesh(*shape)))
  checkpoints.save(1, saved, data={}, meta={})
  found = checkpoints.restore(wanted).items
  assert_identical(found, saved)
  shardings = lambda tree: [leaf.sharding for leaf in jax.tree.leaves(tree)]
  assert shardings(found) == shardings(wanted)


def test_a_part_of_the_items_can_be_restored(checkpoints, tmp_path):
  items = state()
  checkpoints.save(1, items, data={}, meta={})
  checkpoints.wait()
  copy = (tmp_path / "1").rename(tmp_path / "best")
  found = restore_step(copy, {"params": abstract(items["params"])})
  assert_identical(found.items, {"params": items["params"]})
  assert found.step == 1


def test_buffers_may_be_donated_right_after_save(checkpoints):
  step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
  x = jax.random.normal(jax.random.key(0), (1 << 20,))
  for number in range(1, 5):
    want = np.array(x)
    checkpoints.save(number, {"params": {"w": x}}, data={}, meta={})
    x = jax.block_until_ready(step(step(x)))
    found = checkpoints.restore(abstract({"params": {"w": x}}))
    assert found.step == number
    np.testing.assert_array_equal(found.items["params"]["w"], want)


def test_save_returns_before_the_step_is_complete(checkpoints):
  w = jax.block_until_ready(jax.random.normal(jax.random.key(0), (1 << 23,)))
  checkpoints.save(1, {"params": {"w": w}}, data={}, meta={})
  assert checkpoints.steps() == []
  assert checkpoints.wait() == 1
  assert checkpoints.steps() == [1]


def test_saving_the_newest_step_again_changes_nothing(checkpoints):
  checkpoints.save(3, state(), data={"next": 1}, meta={})
  checkpoints.save(3, state(seed=1), data={"next": 2}, meta={})
  checkpoints.wait()
  checkpoints.save(3, state(seed=1), data={"next": 2}, meta={})
  assert checkpoints.restore(abstract(state())).data == {"next": 1}


def test_a_new_folder_has_nothing_to_restore(checkpoints):
  assert checkpoints.restore(abstract(state())) is None


def test_an_explicit_step_is_restored_instead_of_the_newest(checkpoints):
  for step in (1, 2):
    checkpoints.save(step, state(), data={"next": step}, meta={})
  assert checkpoints.restore(abstract(state()), step=1).data == {"next": 1}


def change_shape(params):
  params["layers_0_1"]["q"] = jnp.zeros((16, 25))


def change_dtype(params):
  params["head"] = params["head"].astype(jnp.float32)


def change_name(params):
  params["layers_0_2"] = params.pop("layers_0_1")


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (change_shape, "layers_0_1/q is float32[16, 24] in the checkpoint and float32[16, 25] here"),
    (change_dtype, "head is bfloat16[8, 32] in the checkpoint and float32[8, 32] here"),
    (change_name, "layers_0_2/norm is not in the checkpoint"),
  ],
)
def test_a_state_of_another_model_is_refused_in_one_sentence(checkpoints, tmp_path, change, words):
  checkpoints.save(1, state(), data={}, meta={})
  other = {"params": state()["params"]}
  change(other["params"])
  with pytest.raises(CheckpointError) as error:
    checkpoints.restore(abstract(placed(other, mesh(1, 1))))
  assert words in str(error.value) and "\n" not in str(error.value)
  assert checkpoints.steps() == [1], "a checkpoint that does not fit is not a damaged one"


def test_old_steps_are_pruned_but_for_the_multiples_that_stay(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep_last=2, keep_every=30)
  for step in range(10, 80, 10):
    checkpoints.save(step, {"params": {"w": jnp.ones(2)}}, data={}, meta={})
  checkpoints.close()
  assert checkpoints.steps() == [30, 60, 70]
  assert sorted(path.name for path in tmp_path.iterdir()) == ["30", "60", "70"]


@pytest.mark.parametrize(
  ("keep_last", "keep_every", "want"),
  [(1, 0, [1, 2, 3, 4]), (5, 0, []), (9, 0, []), (2, 2, [1, 3]), (1, 5, [1, 2, 3, 4])],
)
def test_the_newest_step_is_never_expendable(keep_last, keep_every, want):
  assert expendable([5, 3, 1, 2, 4], keep_last=keep_last, keep_every=keep_every) == want
