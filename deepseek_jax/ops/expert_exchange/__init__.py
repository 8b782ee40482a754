"""Tokens travel to the devices that hold their experts and back; none is dropped at any load.

Inside a device every expert's tokens lie together (`routes`); between devices rows move in rounds
of a bounded buffer (`ops/exchange.py`).

Legend: B rows, Q slots, X = B Q tokens, D width, E experts, k experts per token, P padded expert
rows, n devices along the axes that experts are split on, L experts of a device, C rows that one
device receives in a round.
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
    """C, where a device has so many copies to send."""
    return min(math.ceil(self.receive_factor * copies), self.devices * copies)


class _Home(NamedTuple):
  """Where the tokens of this device go."""

  routes: routes.Routes  # its copies, ordered by expert
  load_nE: jax.Array  # int32 copies that each device sends to each expert


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
    size = routes.block_rows(expert.size, len(cast[0]))
    out_XD = _on_this_device(feed_forward, x, expert, weight, cast, size)
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


def _on_this_device(feed_forward, x_XD, expert_Xk, weight_Xk, matrices, block_rows):
  """[X, D] float32; what it returns for a copy that is none (routes.plan) means nothing."""
  to = _kept(routes.plan(expert_Xk, len(matrices[0]), block_rows=block_rows))
  multiply = lambda x_PK, w_EKN: _kept(
    grouped_matmul(x_PK, w_EKN, to.group_rows_E, block_rows=block_rows)
  )
  x_PD = _kept(routes.to_experts(x_XD, to))
  weight_P = _kept(routes.weights_to_experts(weight_Xk, to))
  return routes.from_experts(feed_forward(multiply, x_PD, weight_P, *matrices), to)


def _on_mesh(setup: _Setup, x_BQD, expert_BQk, weight_BQk, matrices):
  """The share of one device, inside shard_map."""
  x, expert, weight = _flat(x_BQD), _flat(expert_BQk), _flat(weight_BQk)
  # Gathered once for all rounds. In the loop of the other rounds XLA would take the sum over
  # devices of the gradients for one to move behind it, and hold a constant of their size.
  whole = _gather(setup, matrices, x.dtype)
  if not setup.axes:
    size = routes.block_rows(expert.size, len(matrices[0]))
    out_XD = _on_this_device(setup.feed_forward, x, expert, weight, whole, size)
    return out_XD.reshape(x_BQD.shape), jnp.ones((), jnp.float32)

  to = routes.plan(expert, setup.devices * len(matrices[0]), block_rows=1)
  home = _kept(_Home(to, jax.lax.all_gather(to.group_rows_E, setup.axes)))
  floats = x, weight, whole
  out_XD = _one_round(setup, 0, floats, home)
  rounds, capacity = jnp.ones((), jnp.int32), setup.capacity(expert.size)
  if capacity < setup.devices * expert.size:
    # Devices meet in every round, so that all take as many as the one that needs most.
    most = exchange.rounds(_sizes(home.load_nE), capacity)
    rounds = _kept(jax.lax.pmax(most, setup.every_axis))
    out_XD: Any = _add_other_rounds(setup, out_XD, rounds, floats, home)  # custom_vjp has no types
  return out_XD.reshape(x_BQD.shape), rounds.astype(jnp.float32)


def _sizes(load_nE: jax.Array) -> jax.Array:
  """int32 [n, n]: copies that each device sends to each."""
  n = len(load_nE)
  return jnp.sum(load_nE.reshape(n, n, -1), axis=-1)


def _gather(setup: _Setup, matrices, dtype):
  pairs = zip(matrices, setup.specs, strict=True)
  return [gathered(w, spec, dtype, setup.axes) for w, spec in pairs]


def _one_round(setup: _Setup, round_, floats, home: _Home) -> jax.Array:
  """[X, D] float32: what the copies of this round add to the tokens of this device."""
  x_XD, weight_Xk, matrices = floats
  copies, me = home.routes.row_Xk.size, jax.lax.axis_index(setup.axes)
  capacity = setup.capacity(copies)
  here = _kept(exchange.segments(_sizes(home.load_nE), me, round_, capacity))
  there = lambda x_Y: exchange.there(x_Y, here, setup.axes, capacity)
  expert_C1 = _expert_of_row(home.load_nE, me, round_, capacity)[:, None]
  x_CD = there(routes.to_experts(x_XD, home.routes))
  weight_C1 = there(routes.weights_to_experts(weight_Xk, home.routes))[:, None]
  size = routes.block_rows(copies, len(matrices[0]))
  y_CD = _on_this_device(setup.feed_forward, x_CD, expert_C1, weight_C1, matrices, size)
  y_YD = exchange.back(y_CD.astype(x_XD.dtype), here, setup.axes, copies)
  return routes.from_experts(y_YD, home.routes)


def _expert_of_row(load_nE: jax.Array, me: jax.Array, round_, capacity: int) -> jax.Array:
  """[C] int32: which of my experts each row that I receive is for; L in places that stay empty.

  My queue is ordered by source and, in what a source sends, by expert.
  """
  n = len(load_nE)
  load_nL = load_nE.reshape(n, n, -1)[:, me]
  end_nL = jnp.cumsum(load_nL.reshape(-1))
  place_C = round_ * capacity + jnp.arange(capacity)
  local = load_nL.shape[1]
  # A binary search would be a loop, and in a loop a GPU waits for the host.
  run_C = jnp.searchsorted(end_nL, place_C, side="right", method="compare_all")
  return jnp.where(place_C < end_nL[-1], run_C % local, local).astype(jnp.int32)


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
