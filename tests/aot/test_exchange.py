"""Rows between devices and experts over devices, on TPUs and GPUs. Compiled, not run."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from deepseek_jax.ops import exchange
from deepseek_jax.ops.expert_exchange import apply_experts
from deepseek_jax.sharding import make_mesh, partition_spec
from deepseek_jax.training_config import MeshConfig
from tests.aot.targets import h200s, tpus, tracing_for
from train.plan_collectives import collectives

pytestmark = pytest.mark.slow
TARGETS = {"h200": lambda: h200s(8), "v5p": lambda: tpus("v5p")}
NAMES_IN, NAMES_OUT = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
KERNELS = {"h200": "mosaic_gpu", "v5p": "tpu_custom_call"}


def compiled(mesh, fn, *args) -> str:
  platform = "tpu" if mesh.devices.flat[0].platform == "tpu" else "cuda"
  with tracing_for(mesh):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).compile().as_text()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("axis", ["expert", ("fsdp", "expert")], ids=["one axis", "two axes"])
@pytest.mark.parametrize("width", [(), (256,)], ids=["numbers", "rows"])
def test_rows_travel_there_and_back_and_so_do_their_gradients(name, axis, width):
  devices = TARGETS[name]()
  mesh = make_mesh(MeshConfig(fsdp=2, expert=len(devices) // 2), list(devices))
  rows = PartitionSpec(("fsdp", "expert"))

  def trip(x_Y, sizes_nnL):
    here = exchange.segments(sizes_nnL, jax.lax.axis_index(axis), 1, 512, block=8)
    y_P = jnp.sin(exchange.there(x_Y, here, axis, exchange.buffer_rows(512, 3, 8)))
    return exchange.back(y_P, here, axis, len(x_Y))

  split = jax.shard_map(
    trip, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
  )
  total = lambda x, sizes: jnp.sum(split(x, sizes).astype(jnp.float32))
  place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, spec)
  )
  n = len(devices) if axis != "expert" else len(devices) // 2
  x = place((1024 * len(devices), *width), jnp.bfloat16 if width else jnp.float32, rows)
  text = compiled(mesh, jax.grad(total), x, place((n, n, 3), jnp.int32, PartitionSpec()))
  found = collectives(text)
  assert found["ragged-all-to-all"]["count"] == 3  # there, and both gradients
  assert "all-gather" not in found and "all-to-all" not in found


def feed_forward(multiply, x_PD, weight_P, w1_EDF, w3_EDF, w2_EFD):
  hidden_PF = jax.nn.silu(multiply(x_PD, w1_EDF)) * multiply(x_PD, w3_EDF)
  return multiply((hidden_PF * weight_P[:, None]).astype(x_PD.dtype), w2_EFD)


def layer(x_BQD, expert_BQk, weight_BQk, matrices):
  named = list(zip(matrices, (NAMES_IN, NAMES_IN, NAMES_OUT), strict=True))
  # With less room than the worst load needs, so that there is a loop.
  return apply_experts(feed_forward, x_BQD, expert_BQk, weight_BQk, named, receive_factor=1.5)


@pytest.mark.parametrize("name", TARGETS)
def test_experts_over_devices_run_their_kernel_and_gather_no_token(name):
  devices = TARGETS[name]()
  mesh = make_mesh(MeshConfig(fsdp=2, expert=len(devices) // 2), list(devices))
  rows, slots, dim, experts, hidden, k = len(devices), 512, 256, 8, 128, 2
  tokens = ("batch", "slots", None)
  shape = lambda names, *s, dtype=jnp.float32: jax.ShapeDtypeStruct(
    s, dtype, sharding=NamedSharding(mesh, partition_spec(names, s, mesh))
  )

  def total(x, weight, matrices, expert):
    recomputed = jax.checkpoint(lambda x, w, m: layer(x, expert, w, m)[0])
    return jnp.sum(jnp.square(recomputed(x, weight, matrices)))

  into, out = shape(NAMES_IN, experts, dim, hidden), shape(NAMES_OUT, experts, hidden, dim)
  text = compiled(
    mesh,
    jax.grad(total, (0, 1, 2)),
    shape(tokens, rows, slots, dim, dtype=jnp.bfloat16),
    shape(tokens, rows, slots, k),
    (into, into, out),
    shape(tokens, rows, slots, k, dtype=jnp.int32),
  )
  assert KERNELS[name] in text
  found = collectives(text)
  local = experts // mesh.shape["expert"]
  # In bfloat16, forward and for the backward pass, and as often in the loops; loads are small.
  loads = 2 * experts * mesh.shape["expert"] * 4
  assert found["all-gather"]["bytes"] <= 5 * 3 * local * dim * hidden * 2 + loads
  assert found["ragged-all-to-all"]["count"] <= 20  # 9, and those of the loops
