"""Lists of distinct entries for tiles of queries: what the TPU kernels need of a selection.

Neighbouring queries choose many of the same entries, and a matrix unit is wider than the heads of
one query. So T queries form a tile; a tile has one ascending list of the entries that any of its
queries chose, and with every entry one bit per query that chose it. The lists know nothing of the
sizes of memories: forward and backward cut them into chunks of entries as their memory demands.

Legend: B rows, Q queries filled up to whole tiles, K chosen entries, T queries of a tile, G tiles
of a row of the batch, J blocks of a list, R places of a block, U = T K places of a list.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

# A tile has at least this many blocks, so that two tiles ahead are always four blocks ahead.
LEAST_BLOCKS = 2

_NOWHERE = 2**31 - 1  # sorts behind every entry


class Chip(NamedTuple):
  """Sizes of a TPU core that decide tiles and chunks."""

  cores: int  # that share one device
  vmem: int  # bytes of vector memory of a core that a kernel may use
  tile: int  # queries that share a list


# Columns of a matrix unit are 128 on v5p, 256 on the later ones; 64 heads times this many queries
# fill them, so that even disjoint selections cost no more matrix time than one query alone.
_TILE = {"v5p": 2, "v6e": 4, "7x": 4}
_COMPILER_VMEM = 2**19  # what Mosaic keeps for itself, found by compiling up to the limit
_INTERPRETED = Chip(cores=1, vmem=2**26, tile=4)


def chip() -> Chip:
  """The TPU that is traced for; stands for one where kernels are interpreted.

  Raises: NotImplementedError on a TPU that the kernels were never compiled for.
  """
  if not pltpu.is_tpu_device():
    return _INTERPRETED
  info = pltpu.get_tpu_info()
  name = str(info.chip_version)
  if name not in _TILE:
    raise NotImplementedError(
      f"the TPU kernels of sparse attention are compiled for {sorted(_TILE)}, this is {name!r}"
    )
  return Chip(info.num_cores, info.vmem_capacity_bytes - _COMPILER_VMEM, _TILE[name])


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["entry_BGJR", "chosen_by_BGJR", "length_BG"],
  meta_fields=["tile"],
)
@dataclasses.dataclass(frozen=True)
class Plan:
  """The lists of all tiles."""

  entry_BGJR: jax.Array  # int32 ascending, then _NOWHERE
  chosen_by_BGJR: jax.Array  # int32, bit t: query t of the tile chose it; 0 behind the end
  length_BG: jax.Array  # int32 places in use
  tile: int


class Span(NamedTuple):
  """The part of every list that lies in one chunk of entries."""

  row_BGJR: jax.Array  # int32 place in the chunk; `spare` for whatever lies elsewhere
  chosen_by_BGJR: jax.Array  # as in the plan, 0 for whatever lies elsewhere
  first_BG: jax.Array  # int32 first block that has a part in the chunk
  blocks_BG: jax.Array  # int32 how many blocks to visit, at least LEAST_BLOCKS


def make(selection_BQK: jax.Array, tile: int, block: int) -> Plan:
  """Lists of a selection: two sorts, no scatter.

  Args:
    selection_BQK: int32 entry ids, -1 for none; Q a multiple of the tile; ids below 2^31 / tile.
    tile: queries that share a list, a power of two.
    block: list places of a block.
  """
  rows, queries, top_k = selection_BQK.shape
  places = tile * top_k
  query_Q1 = (jnp.arange(queries, dtype=jnp.int32) % tile)[:, None]
  key_BQK = jnp.where(selection_BQK >= 0, selection_BQK * tile + query_Q1, _NOWHERE)
  key_BGU = jnp.sort(key_BQK.reshape(rows, queries // tile, places), axis=-1)
  used_BGU = key_BGU != _NOWHERE
  entry_BGU = jnp.where(used_BGU, key_BGU // tile, _NOWHERE)
  bit_BGU = jnp.where(used_BGU, jnp.left_shift(1, key_BGU % tile), 0)
  chosen_by_BGU = jnp.zeros_like(bit_BGU)
  for ahead in range(tile):  # equal entries are neighbours, at most one for each query of the tile
    same_BGU = _shifted(entry_BGU, -ahead, -1) == entry_BGU
    chosen_by_BGU += jnp.where(same_BGU, _shifted(bit_BGU, -ahead, 0), 0)
  first_BGU = used_BGU & (_shifted(entry_BGU, 1, -1) != entry_BGU)
  entry_BGU, chosen_by_BGU = jax.lax.sort(
    (jnp.where(first_BGU, entry_BGU, _NOWHERE), jnp.where(first_BGU, chosen_by_BGU, 0)),
    dimension=-1,
    num_keys=1,
  )
  blocks = max(LEAST_BLOCKS, -(-places // block))
  fill = [(0, 0), (0, 0), (0, blocks * block - places)]
  in_blocks = lambda x_BGU, value: jnp.pad(x_BGU, fill, constant_values=value).reshape(
    rows, queries // tile, blocks, block
  )
  length_BG = jnp.sum(first_BGU, axis=-1, dtype=jnp.int32)
  return Plan(in_blocks(entry_BGU, _NOWHERE), in_blocks(chosen_by_BGU, 0), length_BG, tile)


def cut(plan: Plan, begin: int, end: int, spare: int) -> Span:
  """The part of the lists with begin <= entry < end.

  Args:
    plan: lists over all entries.
    begin, end: entries of the chunk.
    spare: place in the chunk that stands for entries elsewhere.
  """
  block, blocks = plan.entry_BGJR.shape[-1], plan.entry_BGJR.shape[-2]
  inside_BGJR = (plan.entry_BGJR >= begin) & (plan.entry_BGJR < end)
  before_BG = jnp.sum(plan.entry_BGJR < begin, axis=(-2, -1), dtype=jnp.int32)
  until_BG = jnp.sum(plan.entry_BGJR < end, axis=(-2, -1), dtype=jnp.int32)
  # A visit to a block without a part in the chunk adds nothing: all of it is masked.
  first_BG = jnp.minimum(before_BG // block, blocks - LEAST_BLOCKS)
  return Span(
    jnp.where(inside_BGJR, plan.entry_BGJR - begin, spare),
    jnp.where(inside_BGJR, plan.chosen_by_BGJR, 0),
    first_BG,
    jnp.maximum(-(-until_BG // block) - first_BG, LEAST_BLOCKS),
  )


def _shifted(x_BGU: jax.Array, by: int, value: int) -> jax.Array:
  """x moved `by` places to the right (left if negative); freed places get the value."""
  if by == 0:
    return x_BGU
  fill = (by, 0) if by > 0 else (0, -by)
  padded = jnp.pad(x_BGU, [(0, 0), (0, 0), fill], constant_values=value)
  return padded[..., : x_BGU.shape[-1]] if by > 0 else padded[..., -by:]
