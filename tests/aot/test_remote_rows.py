"""Rows that other chips own, in both passes. Compiled, not run."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from deepseek_jax.ops.table_lookup import start_rows, table_lookup
from deepseek_jax.sharding import make_mesh, partition_spec
from deepseek_jax.training_config import MeshConfig
from tests.aot.targets import h200s, tpus, tracing_for
from train.plan_collectives import collectives

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
TARGETS = {"h200": lambda: h200s(2), "v5p": lambda: tpus("v5p")}
B, S, T, D = 4, 2048, 512, 5120


def sent_in_both_passes(name, fn, **shapes):
  """Collectives of fn(x, numbers) and of its gradient; shapes: (shape, dtype, names) of each."""
  devices = list(TARGETS[name]())
  mesh = make_mesh(MeshConfig(context=2, fsdp=len(devices) // 2), devices)
  placed = [
    jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, partition_spec(names, shape, mesh))
    )
    for shape, dtype, names in shapes.values()
  ]

  def both(x, numbers, d_out):
    out, pull = jax.vjp(lambda x: fn(x, numbers), x)
    return out, pull(d_out)[0]

  with tracing_for(mesh):
    lowered = (
      jax.jit(both).trace(*placed).lower(lowering_platforms=({"h200": "cuda"}.get(name, "tpu"),))
    )
    text = lowered.compile().as_text()
  return collectives(text), text


@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_a_table_travel_alone(name):
  rows, slots = 2**18, ("batch", "slots", None, None)
  sent, text = sent_in_both_passes(
    name,
    lambda table, numbers: table_lookup(table, numbers, "bfloat16"),
    table=((rows, 256), jnp.float32, ("table_rows", None)),
    numbers=((B, S, 24), jnp.int32, slots[:3]),
    d_out=((B, S, 24, 256), jnp.bfloat16, slots),
  )
  everything = sum(kind["bytes"] for kind in sent.values())
  ragged = sent["ragged-all-to-all"]["bytes"]
  # A buffer of twice the rows that a device asks for, and on GPUs what goes in beside it.
  assert everything - ragged < 2**16 and ragged < 3.1 * B * S * 24 * (256 * 2 + 4)
  assert ("gpu.triton" in text) == (name == "h200"), "the gradient's rows are summed in order"


@pytest.mark.parametrize("name", TARGETS)
def test_decoder_starts_travel_and_never_all_streams(name):
  slots = ("batch", "slots", None, None)
  sent, _ = sent_in_both_passes(
    name,
    start_rows,
    streams=((B, S, 4, D), jnp.bfloat16, slots),
    numbers=((B, T), jnp.int32, slots[:2]),
    d_out=((B, T, 4, D), jnp.bfloat16, slots),
  )
  everything = sum(kind["bytes"] for kind in sent.values())
  assert everything - sent["ragged-all-to-all"]["bytes"] < 2**16
  assert everything < 3.1 * B * T * 4 * D * 2 < B * S * 4 * D * 2
