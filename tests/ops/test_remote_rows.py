"""Rows of arrays that devices share: the same values and gradients as on one device.

Legend: B rows of the batch, Q or S slots, T decoder slots, R rows of a token, h channels, V rows of
the table, c streams, D width.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from deepseek_jax.ops.table_lookup import start_rows, table_lookup
from deepseek_jax.sharding import make_mesh, partition_spec
from deepseek_jax.training_config import MeshConfig
from tests.thinned import rest_slow
from train.plan_collectives import collectives

MESHES = {
  "fsdp": MeshConfig(fsdp=8),
  "fsdp, expert and context": MeshConfig(fsdp=2, expert=2, context=2),
  "replica and context": MeshConfig(replica=2, context=4),
}
B, Q, R, H, V = 8, 24, 3, 5, 2048
RANDOM = np.random.default_rng(0)
TABLE = jax.random.normal(jax.random.key(0), (V, H)).at[3].set(-0.0)
ROWS = {
  "spread, some of none": RANDOM.integers(-400, V, (B, Q, R)).clip(-1),
  "all of one owner": RANDOM.integers(V - 9, V, (B, Q, R)),
  "one row": np.full((B, Q, R), 3),
  "of no row at all": np.full((B, Q, R), -1),
  "one device asks": np.where(np.arange(B)[:, None, None] == 5, 700, -1) * np.ones((1, Q, R)),
}


def place(mesh, x, *names):
  return jax.device_put(x, NamedSharding(mesh, partition_spec(names, x.shape, mesh)))


@functools.cache
def both_passes(fn):
  """(x, numbers, d_out) -> (fn(x, numbers), d_x), compiled once for the same shapes."""

  def both(x, numbers, d_out):
    out, pull = jax.vjp(lambda x: fn(x, numbers), x)
    return out, pull(d_out)[0]

  return jax.jit(both)


def on_mesh(mesh, x, numbers, d_out, *, is_table):
  slots = ("batch", "slots", *(None,) * (d_out.ndim - 2))
  names = ("table_rows", None) if is_table else slots
  numbers = place(mesh, jnp.asarray(numbers, jnp.int32), *slots[: np.ndim(numbers)])
  return place(mesh, x, *names), numbers, place(mesh, d_out, *slots)


def run(mesh, fn, *arrays):
  """(value, gradient) on a mesh of that name."""
  with jax.set_mesh(mesh := make_mesh(MESHES[mesh])):
    return both_passes(fn)(*on_mesh(mesh, *arrays, is_table=fn is not start_rows))


def lower(mesh, fn, *arrays):
  with jax.set_mesh(mesh := make_mesh(MESHES[mesh])):
    return both_passes(fn).lower(*on_mesh(mesh, *arrays, is_table=fn is not start_rows))


def sent(lowered):
  return collectives(lowered.compile().as_text())


LOOKUP = {dtype: functools.partial(table_lookup, dtype=dtype) for dtype in ("float32", "bfloat16")}


def same_bits(x, y):
  np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("rows", rest_slow(ROWS, 2))
@pytest.mark.parametrize(
  ("mesh", "dtype"), [*((name, "float32") for name in MESHES), ("replica and context", "bfloat16")]
)
def test_a_table_cut_over_devices_reads_and_learns_as_a_whole_one(mesh, rows, dtype):
  rows_BQR = np.int32(ROWS[rows])
  d_BQRh = jax.random.normal(jax.random.key(1), (*rows_BQR.shape, H)).astype(dtype)
  want, pull = jax.vjp(lambda table: LOOKUP[dtype](table, rows_BQR), TABLE)
  got, d_table = run(mesh, LOOKUP[dtype], TABLE, rows_BQR, d_BQRh)
  same_bits(got, want)
  (want,) = pull(d_BQRh)
  np.testing.assert_allclose(d_table, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
  assert np.array_equal(np.any(d_table != 0, 1), np.isin(np.arange(V), rows_BQR))


@pytest.mark.parametrize(
  ("batch", "slots", "size"), [(1, 2, V), (3, 5, V), (8, 24, 1026), (8, 24, 1025)]
)
def test_sizes_that_devices_cannot_share_evenly(batch, slots, size):
  """Devices then hold the same numbers, or more of the table, and nothing counts twice."""
  rows_BQR = RANDOM.integers(-1, size, (batch, slots, R)).astype(np.int32)
  d_BQRh = jax.random.normal(jax.random.key(1), (*rows_BQR.shape, H))
  lookup = LOOKUP["float32"]
  want, pull = jax.vjp(lambda table: lookup(table, rows_BQR), TABLE[:size])
  got, d_table = run("fsdp, expert and context", lookup, TABLE[:size], rows_BQR, d_BQRh)
  same_bits(got, want)
  np.testing.assert_allclose(d_table, pull(d_BQRh)[0], rtol=1e-6, atol=1e-6)


def test_only_rows_that_are_asked_for_travel_and_in_the_dtype_of_the_result():
  rows_BQR = np.int32(ROWS["spread, some of none"])
  table = jnp.zeros((2**16, 64))
  d_BQRh = jnp.zeros((*rows_BQR.shape, 64), jnp.bfloat16)
  lowered = lower("fsdp", LOOKUP["bfloat16"], table, rows_BQR, d_BQRh)
  made = re.findall(r"all_to_all.*-> tensor<[0-9x]*(\w+)>", lowered.as_text())
  assert sorted(made) == ["bf16", "bf16", "i32", "i32"]
  moved = sent(lowered)
  assert set(moved) == {"all-to-all", "all-gather", "all-reduce"}
  # The CPU sends bfloat16 as float32 and pads what a pair exchanges to all numbers of a device.
  assert moved["all-to-all"]["bytes"] <= 2 * rows_BQR.size * (64 + 1) * 4
  assert moved["all-gather"]["bytes"] + moved["all-reduce"]["bytes"] < 4096


S, C, D = 48, 2, 6
CUT_SLOTS = ["fsdp, expert and context", "replica and context"]
X_BScD = jax.random.normal(jax.random.key(2), (B, S, C, D))
SLOTS = {
  "every other one": np.broadcast_to(np.arange(0, S, 2), (B, S // 2)),
  "the end of each row": np.broadcast_to(np.arange(S // 2, S), (B, S // 2)),
  "any, with repeats": RANDOM.integers(0, S, (B, 24)),
  "clamped padding": np.zeros((B, 24), int),
  "an odd number": RANDOM.integers(0, S, (B, 7)),
}


@pytest.mark.parametrize("slots", rest_slow(SLOTS, 1))
@pytest.mark.parametrize("mesh", CUT_SLOTS)
def test_decoder_slots_start_from_the_rows_of_all_devices(mesh, slots):
  slot_BT = np.int32(SLOTS[slots])
  d_BTcD = jax.random.normal(jax.random.key(3), (*slot_BT.shape, C, D))
  want, pull = jax.vjp(lambda x: start_rows(x, slot_BT), X_BScD)
  same_bits(want, np.asarray(X_BScD)[np.arange(B)[:, None], slot_BT])
  got, d_x = run(mesh, start_rows, X_BScD, slot_BT, d_BTcD)
  same_bits(got, want)
  (want,) = pull(d_BTcD)
  np.testing.assert_allclose(d_x, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


def test_gradients_of_repeated_starts_add_up_in_float32():
  x, slot_BT = X_BScD.astype(jnp.bfloat16), np.zeros((B, 64), np.int32)
  d_BTcD = jax.random.normal(jax.random.key(3), (*slot_BT.shape, C, D)).astype(jnp.bfloat16)
  _, d_x = run("replica and context", start_rows, x, slot_BT, d_BTcD)
  want = np.float32(d_BTcD).sum(1).astype(jnp.bfloat16)
  assert d_x.dtype == "bfloat16"
  np.testing.assert_allclose(np.float32(d_x[:, 0]), np.float32(want), rtol=2**-8)


def test_arrays_of_a_tree_are_read_together_whatever_their_types():
  slot_BT = np.int32(SLOTS["any, with repeats"])
  positions_BS = jnp.arange(B * S).reshape(B, S)
  tree = {"streams": X_BScD, "positions": positions_BS, "is odd": positions_BS % 2 == 1}
  with jax.set_mesh(make_mesh(MESHES["replica and context"])):
    got = jax.jit(start_rows)(tree, slot_BT)
  for name, x in tree.items():
    same_bits(got[name], np.asarray(x)[np.arange(B)[:, None], slot_BT])


@pytest.mark.parametrize("mesh", CUT_SLOTS)
def test_streams_are_not_gathered_over_context(mesh):
  rows, slots, starts, width = 4, 4096, 32, 64
  x = jnp.zeros((rows, slots, 4, width), jnp.bfloat16)
  slot_BT = np.broadcast_to(np.arange(starts), (rows, starts))
  d_BTcD = jnp.zeros((rows, starts, 4, width), jnp.bfloat16)
  moved = sent(lower(mesh, start_rows, x, slot_BT, d_BTcD))
  assert set(moved) == {"all-to-all", "all-gather", "all-reduce"}
  # The starts of the rows that a context group shares, as float32 and padded as above, in both
  # passes, against 4096 slots of them.
  here = rows // (4 if "fsdp" in mesh else 2)
  assert moved["all-to-all"]["bytes"] <= 2 * here * starts * (4 * width + 1) * 4
  assert moved["all-gather"]["bytes"] + moved["all-reduce"]["bytes"] < 4096


def test_without_cut_slots_nothing_travels():
  slot_BT = np.int32(SLOTS["any, with repeats"])
  assert sent(lower("fsdp", start_rows, X_BScD, slot_BT, jnp.ones((*slot_BT.shape, C, D)))) == {}
