"""Logical axes reach the mesh as the table says, and never make an array impossible to place."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AxisType, PartitionSpec

from deepseek_jax.sharding import (
  MESH_AXES,
  RULES,
  batch_pieces,
  batch_sharding,
  constrain,
  make_mesh,
  partition_spec,
  state_shardings,
)
from deepseek_jax.training_config import MeshConfig

MESH = MeshConfig(replica=2, fsdp=2, expert=2)


def test_rules_name_only_mesh_axes():
  assert {axis for axes in RULES.values() for axis in axes} <= set(MESH_AXES)


def test_mesh_axes_are_auto_and_multiply_to_the_devices():
  mesh = make_mesh(MESH)
  assert mesh.shape == {"replica": 2, "fsdp": 2, "expert": 2, "context": 1, "tensor": 1}
  assert set(mesh.axis_types) == {AxisType.Auto}


def test_mesh_that_does_not_fit_names_both_numbers():
  with pytest.raises(ValueError, match="fsdp 3.* multiply to 3, but the number of devices is 8"):
    make_mesh(MeshConfig(fsdp=3))


@pytest.mark.parametrize(
  ("names", "shape", "spec"),
  [
    (("embed", "mlp"), (4, 6), PartitionSpec(("fsdp", "expert"), None)),
    (("experts", "embed", "mlp"), (4, 4, 4), PartitionSpec("expert", "fsdp", None)),
    (("batch", "slots", None), (8, 8, 4), PartitionSpec(("replica", "fsdp", "expert"), None, None)),
    (("batch", "embed"), (4, 8), PartitionSpec(("replica", "fsdp"), "expert")),
    (("batch", None), (2, 8), PartitionSpec("replica", None)),  # 2 rows: fsdp no longer divides
    (("embed",), (5,), PartitionSpec(None)),
    (("experts", "experts"), (4, 4), PartitionSpec("expert", None)),
  ],
)
def test_each_mesh_axis_is_used_once_and_only_where_it_divides(names, shape, spec):
  assert partition_spec(names, shape, make_mesh(MESH)) == spec


def test_unknown_axis_name_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match="'embd' has no rule; known are .*'embed'"):
    partition_spec(("embd",), (4,), make_mesh(MESH))


class Linear(nn.Module):
  @nn.compact
  def __call__(self, x_BD):
    init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
    return constrain(x_BD @ self.param("weight", init, (4, 6)), "batch", "mlp")


def test_declared_axes_become_shardings_of_the_unboxed_state():
  mesh, x_BD = make_mesh(MESH), jnp.ones((4, 4))
  create = lambda: {**Linear().init(jax.random.key(0), x_BD), "step": jnp.zeros(())}
  shardings = state_shardings(jax.eval_shape(create), mesh)
  with jax.set_mesh(mesh):
    state = jax.jit(lambda: nn.unbox(create()), out_shardings=shardings)()
  assert state["params"]["weight"].sharding.spec == PartitionSpec(("fsdp", "expert"), None)
  assert state["step"].sharding.is_fully_replicated


def test_constrain_leaves_values_alone_with_and_without_a_mesh():
  x_BD = jnp.arange(16.0).reshape(4, 4)
  assert constrain(x_BD, "batch", "embed") is x_BD
  with jax.set_mesh(make_mesh(MESH)):
    y_BD = jax.jit(lambda x: constrain(x, "batch", None))(x_BD)
  assert (y_BD == x_BD).all()
  assert y_BD.sharding.spec[0] == ("replica", "fsdp")


def test_a_batch_is_cut_into_as_many_pieces_as_the_data_axes_have_devices():
  rows = jax.device_put(jnp.zeros((8, 3, 2)), batch_sharding(make_mesh(MESH)))
  assert rows.addressable_shards[0].data.shape[0] == 8 // batch_pieces(MESH)
