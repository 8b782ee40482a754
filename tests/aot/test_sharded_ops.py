"""Attention with its kernels over several chips: each works on its rows. Compiled, not run."""

import jax
import jax.numpy as jnp
import pytest

from deepseek_jax.ops.sparse_attention import plan_selection, sparse_attention
from deepseek_jax.sharding import batch_sharding, make_mesh
from deepseek_jax.training_config import MeshConfig
from tests.aot.targets import h200s, tpus, tracing_for

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
TARGETS = {"h200": lambda: h200s(2), "v6e": lambda: tpus("v6e")}


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_run_on_every_device_and_no_activation_travels(name):
  devices = TARGETS[name]()
  mesh = make_mesh(MeshConfig(fsdp=len(devices)), list(devices))
  rows, queries = len(devices), 1024
  shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    (rows, *s), dtype, sharding=batch_sharding(mesh)
  )
  sink_H = jax.ShapeDtypeStruct((64,), jnp.float32)

  def gradients(q, window_kv, entry_kv, selection, start, sink):
    plan = plan_selection(selection, entry_kv, q, window=128)
    attend = lambda *floats: jnp.sum(
      sparse_attention(
        *floats[:3], selection, start, floats[3], window=128, plan=plan
      ).out_BQHd.astype(jnp.float32)
    )
    return jax.grad(attend, (0, 1, 2, 3))(q, window_kv, entry_kv, sink)

  integers = shape(queries, 512, dtype=jnp.int32), shape(queries, dtype=jnp.int32)
  with tracing_for(mesh):
    traced = jax.jit(gradients).trace(
      shape(queries, 64, 512), shape(queries, 512), shape(2048, 512), *integers, sink_H
    )
    platform = "tpu" if name == "v6e" else "cuda"
    text = traced.lower(lowering_platforms=(platform,)).compile().as_text()
  assert "all-gather" not in text and "all-to-all" not in text
  assert ("tpu_custom_call" if name == "v6e" else "mosaic_gpu") in text


def test_the_gradient_of_plain_attention_compiles_for_two_gpus():
  """XLA's GPU compiler crashed on an operand that only the forward pass used."""
  mesh = make_mesh(MeshConfig(fsdp=2), list(h200s(2)))
  shape = lambda *s: jax.ShapeDtypeStruct((2, *s), jnp.float32, sharding=batch_sharding(mesh))

  def total(q, window_kv):
    start_BQ, sink_H = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(q.shape[2])
    return sparse_attention(q, window_kv, None, None, start_BQ, sink_H, window=8).out_BQHd.sum()

  with tracing_for(mesh):
    traced = jax.jit(jax.grad(total, (0, 1))).trace(shape(64, 2, 32), shape(64, 32))
    assert traced.lower(lowering_platforms=("cuda",)).compile()
