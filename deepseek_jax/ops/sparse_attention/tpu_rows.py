"""Rows of a table in TPU vector memory that a kernel reads and adds to at any place.

A vector register is 8 lines of 128 words of 32 bits, and a load can start at any line. Two bfloat16
rows share a line, so a row is stored as its own lines of 32-bit words: L = d / 256 of them for
bfloat16, two columns to a word, and d / 128 for float32. A row then costs one load and one store.

Legend: N rows, d columns, L lines of a packed row, R rows of a block.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
# Rows whose loads, additions and stores may mix, since rows of a list are distinct.
_GROUP = 16


def lines_of_row(width: int, dtype) -> int:
  """Lines of 128 words that a row of `width` numbers fills."""
  return width * jnp.dtype(dtype).itemsize // (4 * LANES)


def pack(x_Nd: jax.Array) -> jax.Array:
  """[N, d] -> int32 [N * L, 128]; a word of bfloat16 holds columns c (low) and d / 2 + c (high)."""
  if x_Nd.dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(x_Nd, jnp.int32).reshape(-1, LANES)
  half = x_Nd.shape[1] // 2
  bits_Nd = jax.lax.bitcast_convert_type(x_Nd, jnp.uint16).astype(jnp.uint32)
  words_Nh = bits_Nd[:, :half] | (bits_Nd[:, half:] << 16)
  return jax.lax.bitcast_convert_type(words_Nh, jnp.int32).reshape(-1, LANES)


def unpack(packed_ref, rows: int, width: int, dtype) -> jax.Array:
  """The numbers of `rows` packed rows, [rows, width], exactly as they were."""
  lines = lines_of_row(width, dtype)
  words = [packed_ref[pl.ds(line, rows, stride=lines), :] for line in range(lines)]
  as_float = lambda x: jax.lax.bitcast_convert_type(x, jnp.float32).astype(dtype)
  if dtype == jnp.float32:
    return jnp.concatenate([as_float(x) for x in words], axis=1)
  low, high = [x << 16 for x in words], [x & -65536 for x in words]
  return jnp.concatenate([as_float(x) for x in low + high], axis=1)


def gather(table_ref, first_line_ref, block_ref, lines: int) -> None:
  """block[r] = table row that starts at line first_line[0, 0, r].

  Unrolled, so that the compiler can place the loads under matrix work.
  """
  for r in range(first_line_ref.shape[-1]):
    at = pl.multiple_of(first_line_ref[0, 0, r], lines)
    block_ref[pl.ds(r * lines, lines), :] = table_ref[pl.ds(at, lines), :]


def add(table_ref, first_line_ref, block_ref, lines: int) -> None:
  """Table row that starts at line first_line[0, 0, r] += block[r], all float32.

  Rows of a block are distinct, except those that add nothing to a spare row; so a group is loaded
  before any of it is stored. Order and result are the same in every run.
  """
  rows = first_line_ref.shape[-1]
  for base in range(0, rows, _GROUP):
    group = range(base, min(base + _GROUP, rows))
    places = [pl.ds(pl.multiple_of(first_line_ref[0, 0, r], lines), lines) for r in group]
    sums = [
      table_ref[place, :] + block_ref[pl.ds(r * lines, lines), :]
      for r, place in zip(group, places, strict=True)
    ]
    for place, total in zip(places, sums, strict=True):
      table_ref[place, :] = total


class BlockLists:
  """Copies blocks of lists from main memory to two fixed places in scalar memory, ahead of use.

  A fixed place saves an addition per row, and scalar additions bound the gather. Blocks are counted
  from the first one of a tile and go on into the tiles that follow.
  """

  # What `ahead` holds for a tile: its blocks, its first block among those of all tiles, the same of
  # the next tile, and the first block of the tile after that.
  AHEAD = 5

  def __init__(self, lists_hbm, places, semaphores, ahead):
    self._lists_hbm, self._places, self._semaphores = lists_hbm, places, semaphores
    self.blocks, self.first, self._next_blocks, self._next_first, self._last_first = ahead

  def __getitem__(self, place: int):
    return self._places[place]

  def start(self, block, place: int) -> None:
    in_next = block - self.blocks
    in_last = in_next - self._next_blocks
    at = jnp.where(
      in_next < 0,
      self.first + block,
      jnp.where(in_last < 0, self._next_first + in_next, self._last_first + in_last),
    )
    self._copy(at, place).start()

  def wait(self, place: int) -> None:
    self._copy(0, place).wait()

  def _copy(self, at, place: int):
    return pltpu.make_async_copy(
      self._lists_hbm.at[pl.ds(at, 1)], self._places[place], self._semaphores.at[place]
    )


def ahead_of_tiles(first_BG: jax.Array, blocks_BG: jax.Array, blocks: int) -> jax.Array:
  """int32 [B * G, 1, AHEAD] scalars for BlockLists, whose lists are [B * G * blocks, ...].

  Past the last tile of all it is repeated: its lists are fetched again and never used.
  """
  count = blocks_BG.reshape(-1)
  first = first_BG.reshape(-1) + jnp.arange(count.size, dtype=jnp.int32) * blocks
  after = lambda x: jnp.concatenate([x[1:], x[-1:]])
  columns = [count, first, after(count), after(first), after(after(first))]
  return jnp.stack(columns, axis=-1)[:, None, :]
