"""Rows of a table, and of arrays with a table for each row of the batch, by number.

Legend: X axes of the numbers, R looked-up rows, h channels of a row, B rows of the batch, N rows of
its own that each of them has, S encoder slots, T decoder slots.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from deepseek_jax.ops.remote_rows import Ownership, remote_rows
from deepseek_jax.sharding import mesh_axes, mesh_to_split, partition_spec


def table_lookup(table: jax.Array, rows_XR: jax.Array, dtype) -> jax.Array:
  """[X, R, h] rows of the table in `dtype`; row -1 reads zeros and has no gradient.

  On a mesh that cuts the table by its rows, rows travel in `dtype`, and X are the rows of the batch
  and their slots.
  """
  if (mesh := mesh_to_split()) is not None:
    spec = partition_spec(("table_rows", None), table.shape, mesh)
    if owners := mesh_axes(spec[0]):
      here = len(table) // math.prod(mesh.shape[axis] for axis in owners)
      names = ("batch", "slots", *(None,) * (rows_XR.ndim - 2))
      numbers = partition_spec(names, rows_XR.shape, mesh)
      return remote_rows(table, rows_XR, Ownership(owners, spec, (here,), numbers), dtype)
  taken = table[jnp.maximum(rows_XR, 0)].astype(dtype)
  return jnp.where((rows_XR >= 0)[..., None], taken, 0)


def start_rows(xs: Any, slot_BT: jax.Array) -> Any:
  """x[b, slot[b]] for every array [B, S, ...] of a tree; slots are in range and may repeat.

  On a mesh that cuts slots, T rows travel and no array is gathered.
  """
  if (mesh := mesh_to_split()) is not None:
    rows, slots = jax.tree.leaves(xs)[0].shape[:2]
    spec = partition_spec(("batch", "slots"), (rows, slots), mesh)
    if owners := mesh_axes(spec[1]):
      pieces = lambda entry: math.prod(mesh.shape[axis] for axis in mesh_axes(entry))
      b, s = rows // pieces(spec[0]), slots // pieces(spec[1])
      row_B1 = jnp.arange(rows, dtype=jnp.int32)[:, None] % b
      number_BT = (slot_BT // s * b + row_B1) * s + slot_BT % s
      numbers = partition_spec(("batch", "slots"), slot_BT.shape, mesh)
      return remote_rows(xs, number_BT, Ownership(owners, spec, (b, s), numbers))
  return jax.tree.map(lambda x_BS: take_own(x_BS, slot_BT), xs)


def take_own(x_BN: jax.Array, id_BX: jax.Array) -> jax.Array:
  """[B, X, ...]: x[b, id[b]] for every row b of the batch; -1 reads row 0, to be masked."""
  return jax.vmap(lambda x_N, id_X: x_N[jnp.maximum(id_X, 0)])(x_BN, id_BX)
