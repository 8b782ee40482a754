"""Tokens travel to the devices that hold their experts and back; none is dropped at any load.

A device sorts its tokens by expert (`routes`); between devices rows move in rounds of a bounded
buffer, in which every expert's rows lie together (`ops/exchange.py`).

Legend: B rows, Q slots, X = B Q tokens, D width, E experts, k experts per token, Y = X k copies,
P padded expert rows, n devices along the axes that experts are split on, L experts of a device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from deepseek_jax.by_slots import gathered
from deepseek_jax.ops import exchange
from deepseek_jax.ops.expert_exchange import routes
from deepseek_jax.ops.grouped_matmul import grouped_matmul
from deepseek_jax.sharding import Names, mesh_axes, mesh_to_split, partition_spec

# (multiply, x_PD, weight_P, *matrices) -> y_PD, row by row; multiply(x, matrix) takes each row
# times the matrix of its expert.
FeedForward = Callable[..., jax.Array]


# Not by_slots.KEPT: a model that keeps attention may not want to keep these, which are larger.
_ROWS = "rows of experts"


class _Setup(NamedTuple):
  """What is known while tracing."""

  feed_forward: FeedForward
  specs: tuple[PartitionSpec, ...]  # of the matrices
  axes: tuple[str, ...]  # of the mesh, that experts are split on
  devices: int  # n
  every_axis: tuple[str, ...]
  receive_factor: float

  def capacity(self, copies: int) -> int:
    """Rows that a device receives in a round, where each has so many copies to send."""
    return min(math.ceil(self.receive_factor * copies), self.devices * copies)


class _Home(NamedTuple):
  """Where the tokens of this device go."""

  routes: routes.Routes  # its copies, ordered by expert
  load_nnL: jax.Array  # int32 copies that each device has for each device's experts


def apply_experts(
  feed_forward: FeedForward,
  x_BQD: jax.Array,
  expert_BQk: jax.Array,
  weight_BQk: jax.Array,
  matrices: Sequence[tuple[jax.Array, Names]],
  *,
  receive_factor: float,
) -> tuple[jax.Array, jax.Array]:
  """sum over a token's experts of feed_forward(token, weight), summed in float32.

  On a mesh every device routes the tokens that it holds. What a device receives at a time is at
  most receive_factor times what it would receive under an even load; an uneven one takes rounds.

  Args:
    feed_forward: see FeedForward.
    x_BQD: tokens in the compute dtype.
    expert_BQk: int32.
    weight_BQk: float32.
    matrices: float32 [E, ...] with their logical axes, the first of which is "experts"; they are
      cast to x's dtype before they travel, and their gradients are summed in float32.
    receive_factor: at least 1.

  Returns: [B, Q, D] float32 and the number of rounds, float32 [].
  """
  mesh = mesh_to_split()
  if mesh is None:
    cast = [w.astype(x_BQD.dtype) for w, _ in matrices]
    x, expert, weight = _flat(x_BQD), _flat(expert_BQk), _flat(weight_BQk)
    out_XD = _on_this_device(feed_forward, x, expert, weight, cast)
    return out_XD.reshape(x_BQD.shape), jnp.ones((), jnp.float32)

  specs = tuple(partition_spec(names, w.shape, mesh) for w, names in matrices)
  leading = partition_spec(("batch", "slots"), x_BQD.shape[:2], mesh)
  axes = mesh_axes(specs[0][0])
  devices = math.prod(mesh.shape[axis] for axis in axes)
  setup = _Setup(feed_forward, specs, axes, devices, mesh.axis_names, receive_factor)
  # The backward pass gathers the matrices again, and computes nothing else again. Inside another
  # checkpoint, which gathers them again too, XLA makes one gather of both: hence prevent_cse.
  kept = jax.checkpoint_policies.save_only_these_names(_ROWS)
  split = jax.shard_map(
    jax.checkpoint(functools.partial(_on_mesh, setup), policy=kept, prevent_cse=False),
    in_specs=(leading, leading, leading, specs),
    out_specs=(leading, PartitionSpec()),
    check_vma=False,  # kernels do not say along which axes their results vary
  )
  return split(x_BQD, expert_BQk, weight_BQk, tuple(w for w, _ in matrices))


def _flat(x_BQ: jax.Array) -> jax.Array:
  return x_BQ.reshape(-1, x_BQ.shape[-1])


def _kept(tree: Any) -> Any:
  """Marks what the backward pass reads instead of computing it again."""
  return jax.tree.map(lambda x: checkpoint_name(x, _ROWS), tree)


def _on_this_device(feed_forward, x_XD, expert_Xk, weight_Xk, matrices):
  """[X, D] float32, where every expert is here."""
  block = routes.block_rows(expert_Xk.size, len(matrices[0]))
  to = _kept(routes.plan(expert_Xk, len(matrices[0]), block_rows=block))
  x_PD = routes.to_experts(x_XD, to)
  weight_P = routes.weights_to_experts(weight_Xk, to)
  y_PD = _experts(feed_forward, x_PD, weight_P, matrices, to.group_rows_E, block)
  return routes.from_experts(y_PD, to)


def _experts(feed_forward, x_PD, weight_P, matrices, rows_L, block_rows):
  """[P, D]: rows that lie by expert, rows_L for each."""
  multiply = lambda x_PK, w_LKN: _kept(grouped_matmul(x_PK, w_LKN, rows_L, block_rows=block_rows))
  return feed_forward(multiply, _kept(x_PD), _kept(weight_P), *matrices)


def _on_mesh(setup: _Setup, x_BQD, expert_BQk, weight_BQk, matrices):
  """The share of one device, inside shard_map."""
  x, expert, weight = _flat(x_BQD), _flat(expert_BQk), _flat(weight_BQk)
  # Gathered once for all rounds. In the loop of the other rounds XLA would take the sum over
  # devices of the gradients for one to move behind it, and hold a constant of their size.
  whole = _gather(setup, matrices, x.dtype)
  if not setup.axes:
    out_XD = _on_this_device(setup.feed_forward, x, expert, weight, whole)
    return out_XD.reshape(x_BQD.shape), jnp.ones((), jnp.float32)

  to = routes.plan(expert, setup.devices * len(matrices[0]), block_rows=1)
  load_nL = to.group_rows_E.reshape(setup.devices, -1)
  home = _kept(_Home(to, jax.lax.all_gather(load_nL, setup.axes)))
  floats = x, weight, whole
  out_XD = _one_round(setup, 0, floats, home)
  rounds, capacity = jnp.ones((), jnp.int32), setup.capacity(expert.size)
  if capacity < setup.devices * expert.size:
    # Devices meet in every round, so that all take as many as the one that needs most.
    most = exchange.rounds(home.load_nnL, capacity)
    rounds = _kept(jax.lax.pmax(most, setup.every_axis))
    out_XD: Any = _add_other_rounds(setup, out_XD, rounds, floats, home)  # custom_vjp has no types
  return out_XD.reshape(x_BQD.shape), rounds.astype(jnp.float32)


def _gather(setup: _Setup, matrices, dtype):
  pairs = zip(matrices, setup.specs, strict=True)
  return [gathered(w, spec, dtype, setup.axes) for w, spec in pairs]


def _one_round(setup: _Setup, round_, floats, home: _Home) -> jax.Array:
  """[X, D] float32: what the copies of this round add to the tokens of this device."""
  x_XD, weight_Xk, matrices = floats
  copies, local = home.routes.row_Xk.size, len(matrices[0])
  capacity, block = setup.capacity(copies), routes.block_rows(copies, local)
  me = jax.lax.axis_index(setup.axes)
  here = _kept(exchange.segments(home.load_nnL, me, round_, capacity, block))
  rows = exchange.buffer_rows(capacity, local, block)
  there = lambda x_Y: exchange.there(x_Y, here, setup.axes, rows)
  x_PD = there(routes.to_experts(x_XD, home.routes))
  weight_P = there(routes.weights_to_experts(weight_Xk, home.routes))
  y_PD = _experts(setup.feed_forward, x_PD, weight_P, matrices, here.rows_L, block)
  y_YD = exchange.back(y_PD.astype(x_XD.dtype), here, setup.axes, copies)
  return routes.from_experts(y_YD, home.routes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_other_rounds(setup: _Setup, out_XD, rounds, floats, home: _Home) -> jax.Array:
  """Rounds 1, 2, ... until every queue is empty, usually none; each runs again backwards."""
  add = lambda r, out_XD: out_XD + _one_round(setup, r, floats, home)
  return jax.lax.fori_loop(1, rounds, add, out_XD)


def _backward(setup: _Setup, saved, d_out_XD):
  rounds, floats, home = saved

  def add(r, total):
    _, vjp = jax.vjp(lambda floats: _one_round(setup, r, floats, home), floats)
    return jax.tree.map(lambda t, d: t + d.astype(jnp.float32), total, vjp(d_out_XD)[0])

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), floats)
  total = jax.lax.fori_loop(1, rounds, add, zeros)
  d_floats = jax.tree.map(lambda d, x: d.astype(x.dtype), total, floats)
  return d_out_XD, None, d_floats, None


_add_other_rounds.defvjp(
  lambda setup, out, *rest: (_add_other_rounds(setup, out, *rest), rest), _backward
)
