"""What both passes of sparse attention on a TPU share: sizes, blocks of the grid, masks, products.

Legend: B rows, Q queries, H heads, d head width, S = B Q slots, T queries of a tile, G tiles of a
row of the batch, J blocks of a list, R places of a block, M = T H score rows of a tile, W window,
P = 2 W slots in reach of a tile, L lines of a packed row.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.ops.sparse_attention import tpu_plan, tpu_rows
from deepseek_jax.ops.sparse_attention.tpu_rows import LANES

LOG2E = math.log2(math.e)  # scores are in units of log 2: what the unit computes are powers of 2
LOWEST = -1e30  # stands in for minus infinity, so that no difference of infinities can arise
# Vector memory for registers that the compiler spills and for its own windows: with the largest
# table that the rest of the sum allows, 0.5 MiB was too little on v5p and v6e; this is enough.
COMPILER_BYTES = 3 * 2**20
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
ROWS_BY_ROWS = (((1,), (1,)), ((), ()))
COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))


class Sizes(NamedTuple):
  """What a kernel is compiled for."""

  rows: int  # B
  cores: int  # that share the tiles of a row of the batch
  tiles: int  # G, a multiple of the cores
  tile: int  # T
  heads: int  # H
  width: int  # d
  window: int  # W
  blocks: int  # J; 0 without entries
  block: int  # R = P, so that lists and window share buffers
  entries: int  # of the chunk that is in memory

  @property
  def score_rows(self) -> int:
    return self.tile * self.heads

  @property
  def tiles_of_core(self) -> int:
    return self.tiles // self.cores


class ListInputs(NamedTuple):
  ahead: Any  # int32 [1, 1, AHEAD] scalars
  chosen_by: Any  # int32 [1, J, R]
  first_lines: Any  # int32 [B G J, 1, R] in main memory
  table: Any  # int32 [entries of all chunks of all rows * L, 128] in main memory


def dot(a, b, dimensions):
  """Float32 product; float32 operands are not rounded."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)


def across(x, columns: int):
  """[M, 128] with equal lanes -> [M, columns]."""
  return x[:, :columns] if columns <= LANES else jnp.concatenate([x] * (columns // LANES), axis=1)


def down(x_1M):
  """[1, M] -> [M, 128] with equal lanes."""
  return jnp.broadcast_to(x_1M, (LANES, x_1M.shape[1])).T


def entry_bias(chosen_by_1R, tile: int):
  """For every query of the tile 0 where it chose the entry, LOWEST elsewhere, [1, R]."""
  return [
    jnp.where((chosen_by_1R & (1 << t)) != 0, 0.0, LOWEST).astype(jnp.float32) for t in range(tile)
  ]


def window_bias(first_slot_ref, tile_start, sizes: Sizes):
  """For every query of the tile 0 where it sees a slot of its two blocks, LOWEST elsewhere."""
  begin = (tile_start // sizes.window - 1) * sizes.window
  slot_1P = begin + jax.lax.broadcasted_iota(jnp.int32, (1, 2 * sizes.window), 1)
  bias = []
  for t in range(sizes.tile):
    own = tile_start + t
    first = jnp.maximum(first_slot_ref[0, 0, t], own - (sizes.window - 1))
    seen = (slot_1P >= first) & (slot_1P <= own)
    bias.append(jnp.where(seen, 0.0, LOWEST).astype(jnp.float32))
  return bias


def copy_table(table_hbm, gathered, sizes: Sizes, row, place_of_chunk) -> None:
  """The chunk's rows of this row of the batch, from main to vector memory."""
  chunk, chunks = place_of_chunk
  lines = table_hbm.shape[0] // (sizes.rows * chunks)
  copy = pltpu.make_async_copy(
    table_hbm.at[pl.ds((row * chunks + chunk) * lines, lines)],
    gathered.table.at[pl.ds(0, lines)],
    gathered.table_semaphore,
  )
  copy.start()
  copy.wait()


class Chunk(NamedTuple):
  """One chunk of entries as the kernels take it."""

  span: tpu_plan.Span
  table: jax.Array  # int32 [B * chunks * entries * L, 128], packed rows of all chunks
  place: tuple[int, int]  # which chunk of how many


def first_lines(chunk: Chunk, dtype, width: int) -> jax.Array:
  """int32 [B G J, 1, R]: where the rows of the lists begin in a table of this dtype."""
  row_BGJR = chunk.span.row_BGJR
  lines = tpu_rows.lines_of_row(width, dtype)
  return row_BGJR.reshape(-1, 1, row_BGJR.shape[-1]) * lines


def list_inputs(chunk: Chunk, dtype, width: int) -> ListInputs:
  span = chunk.span
  blocks, block = span.row_BGJR.shape[-2:]
  return ListInputs(
    tpu_rows.ahead_of_tiles(span.first_BG, span.blocks_BG, blocks),
    span.chosen_by_BGJR.reshape(-1, blocks, block),
    first_lines(chunk, dtype, width),
    chunk.table,
  )


def compiler_params(vmem: int) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary", "arbitrary"),
    vmem_limit_bytes=vmem,
    # A check is a branch, which no work crosses; the lists hold only places of the table.
    disable_bounds_checks=True,
  )


def by_tile(sizes: Sizes, *block, memory_space=None):
  """A block of the tile's own; arrays have a leading axis of tiles, of all rows of the batch."""
  at = lambda core, row, step: (
    (row * sizes.cores + core) * sizes.tiles_of_core + step,
    *[0] * (len(block) - 1),
  )
  return pl.BlockSpec(block, at, memory_space=memory_space)


def window_blocks(sizes: Sizes):
  """The slots before those of the tile, and those of the tile: two blocks of W."""
  tiles = sizes.window // sizes.tile

  def at(core, row, step, back):
    number = (row * sizes.cores + core) * sizes.tiles_of_core + step
    return jnp.maximum(number // tiles - back, 0), 0

  shape = (sizes.window, sizes.width)
  return tuple(pl.BlockSpec(shape, functools.partial(at, back=back)) for back in (1, 0))


def own_window_block(sizes: Sizes):
  """The block of W slots that the tile lies in; tiles of a block come one after the other."""
  tiles = sizes.window // sizes.tile

  def at(core, row, step):
    return ((row * sizes.cores + core) * sizes.tiles_of_core + step) // tiles, 0, 0

  return pl.BlockSpec((1, sizes.window, sizes.width), at)


def joined_window(d_window, width: int) -> jax.Array:
  """Every block of slots is seen from itself and from the block after it, which kept it apart."""
  from_after, from_itself = d_window
  # What the first block of a row keeps for the block before it is zero.
  from_after = jnp.concatenate([from_after[1:], jnp.zeros_like(from_after[:1])])
  return (from_itself + from_after).reshape(-1, width)


def main_memory():
  return pl.BlockSpec(memory_space=pl.ANY)


def list_blocks(sizes: Sizes) -> ListInputs:
  ahead = by_tile(sizes, 1, 1, tpu_rows.BlockLists.AHEAD, memory_space=pltpu.SMEM)
  chosen_by = by_tile(sizes, 1, sizes.blocks, sizes.block)
  return ListInputs(ahead, chosen_by, main_memory(), main_memory())
