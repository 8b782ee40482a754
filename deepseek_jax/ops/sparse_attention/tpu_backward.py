"""Sparse attention backward on one TPU core: the gradient of the table grows in vector memory.

Tiles and lists are those of the forward pass. X = [Q; dO] of a tile stands in vector memory, and
three matrix products carry all five of a block:

  [S; dP] = X KV^T        dQ += dS KV        dKV = [dS; P]^T X

The last one sums over the queries and heads of the tile, so a row that several queries chose gives
one contribution. Contributions are added to float32 rows in vector memory, which stay there for all
tiles; a core walks its tiles in order, so the order of every sum is fixed. Cores of one device keep
a sum each. The gradients of the window grow in output blocks that neighbouring tiles share.

Legend: B rows, Q queries, H heads, d head width, S = B Q, T queries of a tile, G tiles of a row of
the batch, J blocks of a list, R list places of a block, M = T H score rows of a tile, W window.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.ops.sparse_attention import tpu_rows, tpu_tiles
from deepseek_jax.ops.sparse_attention.tpu_rows import LANES
from deepseek_jax.ops.sparse_attention.tpu_tiles import (
  COLUMNS_BY_COLUMNS,
  LOG2E,
  ROWS_BY_COLUMNS,
  ROWS_BY_ROWS,
  Chunk,
  Sizes,
  across,
  by_tile,
  dot,
)

# Zero rows behind the chunk, where the free places of a list point: within a group of additions a
# real row would lose what another place of the group adds to it. Eight keep the rows aligned.
SPARE_ROWS = 8


class _Inputs(NamedTuple):
  first_slot: Any  # int32 [1, 1, T] scalars
  q: Any  # [T, H, d]
  d_out: Any  # [T, H, d]
  lse: Any  # float32 [1, 1, M]
  delta: Any  # float32 [1, 1, M]
  window: Any  # two [W, d]; None in a later chunk
  earlier_d_q: Any  # [T, H, d] of the chunks before; None in the first
  lists: Any  # tpu_tiles.ListInputs; None without entries
  sum_lines: Any  # as lists.first_lines, for the float32 rows of the gradient


class _Outputs(NamedTuple):
  d_q: Any  # [T, H, d]
  d_window: Any  # two float32 [1, W, d]; None in a later chunk
  d_table: Any  # float32 [cores, B entries d / 128, 128] in main memory


class _Scratch(NamedTuple):
  x: Any  # [2 M, d]: queries, then gradients of the output
  statistics: Any  # float32 [2 M, 128], equal lanes: lse in units of log 2, then delta
  keys: Any  # [R, d]
  scores: Any  # float32 [2 M, R]: S, then dP
  weights: Any  # [2 M, R]: dS, then P
  d_q: Any  # float32 [M, d]
  gathered: Any  # _Gathered; None without entries


class _Gathered(NamedTuple):
  table: Any  # int32 [(entries + SPARE_ROWS) L, 128]
  d_table: Any  # float32 [(entries + SPARE_ROWS) d / 128, 128]
  packed: Any  # 2 x int32 [R L, 128]
  d_keys: Any  # 2 x float32 [R d / 128, 128]
  lists: Any  # 2 x int32 [1, 1, R] scalars
  sum_lists: Any  # 2 x int32 [1, 1, R] scalars
  list_semaphores: Any
  sum_semaphores: Any
  table_semaphore: Any


class _Tile:
  """The stages of one tile."""

  def __init__(self, sizes: Sizes, number, inputs: _Inputs, scratch: _Scratch):
    self.sizes, self.number, self.inputs, self.scratch = sizes, number, inputs, scratch
    self.lines = tpu_rows.lines_of_row(sizes.width, inputs.q.dtype)
    self.sum_lines = tpu_rows.lines_of_row(sizes.width, jnp.float32)
    if scratch.gathered is not None:
      gathered = scratch.gathered
      ahead = [inputs.lists.ahead[0, 0, i] for i in range(tpu_rows.BlockLists.AHEAD)]
      self.lists = tpu_rows.BlockLists(
        inputs.lists.first_lines, gathered.lists, gathered.list_semaphores, ahead
      )
      self.sum_lists = tpu_rows.BlockLists(
        inputs.sum_lines, gathered.sum_lists, gathered.sum_semaphores, ahead
      )

  def start_core(self, row, place_of_chunk) -> None:
    """Table in, gradients zero, block 0 gathered, the lists that the first pair waits for."""
    sizes, gathered = self.sizes, self.scratch.gathered
    self.lists.start(0, 0)
    tpu_tiles.copy_table(self.inputs.lists.table, gathered, sizes, row, place_of_chunk)
    spare = pl.ds(sizes.entries * self.lines, SPARE_ROWS * self.lines)
    gathered.table[spare, :] = jnp.zeros((SPARE_ROWS * self.lines, LANES), jnp.int32)
    rows = SPARE_ROWS * self.sum_lines

    def clear(i, _):
      gathered.d_table[pl.ds(pl.multiple_of(i * rows, rows), rows), :] = jnp.zeros(
        (rows, LANES), jnp.float32
      )
      return 0

    jax.lax.fori_loop(0, sizes.entries // SPARE_ROWS + 1, clear, 0)
    self.lists.wait(0)
    self.fetch(0, into=0)
    self.lists.start(1, 1)
    self.lists.start(2, 0)
    # The first pair delivers what stands for the block before: zeros, to any place.
    gathered.d_keys[1][...] = jnp.zeros_like(gathered.d_keys[1])
    self.sum_lists.start(0, 0)
    self.sum_lists.start(0, 1)

  def end_core(self, core, row, d_table) -> None:
    """The last contributions, then the gradients out; leaves no copy under way."""
    gathered = self.scratch.gathered
    self.sum_lists.wait(1)
    self.deliver(1)
    self.sum_lists.wait(0)
    self.lists.wait(0)
    self.lists.wait(1)
    lines = self.sizes.entries * self.sum_lines
    copy = pltpu.make_async_copy(
      gathered.d_table.at[pl.ds(0, lines)],
      d_table.at[core, pl.ds(row * lines, lines)],
      gathered.table_semaphore,
    )
    copy.start()
    copy.wait()

  def begin(self) -> None:
    M, d, scratch, inputs = self.sizes.score_rows, self.sizes.width, self.scratch, self.inputs
    scratch.x[:M, :] = inputs.q[...].reshape(M, d)
    scratch.x[M:, :] = inputs.d_out[...].reshape(M, d)
    scratch.statistics[:M, :] = tpu_tiles.down(inputs.lse[...].reshape(1, M) * LOG2E)
    scratch.statistics[M:, :] = tpu_tiles.down(inputs.delta[...].reshape(1, M))
    if inputs.earlier_d_q is None:
      scratch.d_q[...] = jnp.zeros_like(scratch.d_q)
    else:
      scratch.d_q[...] = inputs.earlier_d_q[...].reshape(M, d).astype(jnp.float32)

  def fetch(self, place: int, into: int) -> None:
    """Gathers the block whose list is in `place`."""
    gathered = self.scratch.gathered
    tpu_rows.gather(gathered.table, self.lists[place], gathered.packed[into], self.lines)

  def deliver(self, place: int) -> None:
    """Adds the contributions of a block to the gradients of its rows."""
    gathered = self.scratch.gathered
    tpu_rows.add(gathered.d_table, self.sum_lists[place], gathered.d_keys[place], self.sum_lines)

  def gradients(self, bias):
    """Adds to dQ what the keys give, returns dKV in float32."""
    sizes, scratch = self.sizes, self.scratch
    M, R, scale = sizes.score_rows, sizes.block, sizes.width**-0.5
    keys = scratch.keys[...]
    scratch.scores[...] = dot(scratch.x[...], keys, ROWS_BY_ROWS)
    for t in range(sizes.tile):
      rows, d_rows = pl.ds(t * sizes.heads, sizes.heads), pl.ds(M + t * sizes.heads, sizes.heads)
      lse, delta = scratch.statistics[rows, :], scratch.statistics[d_rows, :]
      scores = scratch.scores[rows, :] * (scale * LOG2E) + bias[t]
      weights = jnp.exp2(scores - across(lse, R))
      d_weights = scratch.scores[d_rows, :] - across(delta, R)
      scratch.weights[rows, :] = (weights * d_weights * scale).astype(scratch.weights.dtype)
      scratch.weights[d_rows, :] = weights.astype(scratch.weights.dtype)
    scratch.d_q[...] += dot(scratch.weights[:M, :], keys, ROWS_BY_COLUMNS)
    return dot(scratch.weights[...], scratch.x[...], COLUMNS_BY_COLUMNS)

  def differentiate_window(self, tile_start, d_window) -> None:
    window, keys = self.sizes.window, self.scratch.keys

    @pl.when(tile_start % window == 0)
    def _():
      for d_slots in d_window:
        d_slots[...] = jnp.zeros_like(d_slots)

    for i, slots in enumerate(self.inputs.window):
      keys[i * window : (i + 1) * window, :] = slots[...]
    d_keys = self.gradients(tpu_tiles.window_bias(self.inputs.first_slot, tile_start, self.sizes))
    for i, d_slots in enumerate(d_window):
      d_slots[0] += d_keys[i * window : (i + 1) * window]

  def differentiate(self, place: int, block):
    """The gathered block in `place`; its contributions wait there to be delivered."""
    sizes, gathered = self.sizes, self.scratch.gathered
    packed, keys = gathered.packed[place], self.scratch.keys
    keys[...] = tpu_rows.unpack(packed, sizes.block, sizes.width, keys.dtype)
    first = self.lists.first - self.number * sizes.blocks  # of the tile's own blocks
    chosen_by = self.inputs.lists.chosen_by[0, pl.ds(first + block, 1), :]
    return self.gradients(tpu_tiles.entry_bias(chosen_by, sizes.tile))

  def stage(self, place: int, d_keys) -> None:
    """Contributions as whole rows, one after the other."""
    staged = self.scratch.gathered.d_keys[place]
    for line in range(self.sum_lines):
      columns = d_keys[:, line * LANES : (line + 1) * LANES]
      staged[pl.ds(line, self.sizes.block, stride=self.sum_lines), :] = columns

  def differentiate_entries(self) -> None:
    """All blocks of the list; ends with the next tile's first gathered, the last undelivered."""
    blocks, lists, sum_lists = self.lists.blocks, self.lists, self.sum_lists

    def pair(i, _):
      for place in (0, 1):
        lists.wait(place)
        sum_lists.wait(place)
      for place in (0, 1):
        self.fetch(1 - place, into=1 - place)  # one block ahead
        self.deliver(1 - place)  # one block behind
        self.stage(place, self.differentiate(place, 2 * i + place))
      lists.start(2 * i + 3, 1)
      lists.start(2 * i + 4, 0)
      sum_lists.start(2 * i + 1, 1)
      sum_lists.start(2 * i + 2, 0)
      return 0

    jax.lax.fori_loop(0, blocks // 2, pair, 0)

    @pl.when(blocks % 2 == 1)
    def _():  # places change sides, so that the next tile finds its blocks as after a pair
      for place in (0, 1):
        lists.wait(place)
        sum_lists.wait(place)
      d_keys = self.differentiate(0, blocks - 1)
      self.fetch(1, into=0)
      self.deliver(1)
      self.stage(1, d_keys)
      lists.start(blocks + 1, 1)
      lists.start(blocks + 2, 0)
      sum_lists.start(blocks - 1, 1)
      sum_lists.start(blocks, 0)


def _kernel(inputs: _Inputs, outputs: _Outputs, scratch: _Scratch, *, sizes, place_of_chunk):
  core, row, step = (pl.program_id(axis) for axis in range(3))
  number = (row * sizes.cores + core) * sizes.tiles_of_core + step
  tile = _Tile(sizes, number, inputs, scratch)
  if sizes.blocks:

    @pl.when(step == 0)
    def _():
      tile.start_core(row, place_of_chunk)

  tile.begin()
  if inputs.window is not None:
    tile_start = (core * sizes.tiles_of_core + step) * sizes.tile
    tile.differentiate_window(tile_start, outputs.d_window)
  if sizes.blocks:
    tile.differentiate_entries()

    @pl.when(step == sizes.tiles_of_core - 1)
    def _():
      tile.end_core(core, row, outputs.d_table)

  d_q = scratch.d_q[...].reshape(sizes.tile, sizes.heads, sizes.width)
  outputs.d_q[...] = d_q.astype(outputs.d_q.dtype)


def _scratch(sizes: Sizes, dtype) -> _Scratch:
  M, d, block = sizes.score_rows, sizes.width, sizes.block
  float32 = lambda *shape: pltpu.VMEM(shape, jnp.float32)
  gathered = None
  if sizes.blocks:
    lines, sum_lines = tpu_rows.lines_of_row(d, dtype), tpu_rows.lines_of_row(d, jnp.float32)
    words = lambda rows: pltpu.VMEM((rows * lines, LANES), jnp.int32)
    lists = (pltpu.SMEM((1, 1, sizes.block), jnp.int32),) * 2
    gathered = _Gathered(
      table=words(sizes.entries + SPARE_ROWS),
      d_table=float32((sizes.entries + SPARE_ROWS) * sum_lines, LANES),
      packed=(words(sizes.block),) * 2,
      d_keys=(float32(sizes.block * sum_lines, LANES),) * 2,
      lists=lists,
      sum_lists=lists,
      list_semaphores=pltpu.SemaphoreType.DMA((2,)),
      sum_semaphores=pltpu.SemaphoreType.DMA((2,)),
      table_semaphore=pltpu.SemaphoreType.DMA,
    )
  return _Scratch(
    x=pltpu.VMEM((2 * M, d), dtype),
    statistics=float32(2 * M, LANES),
    keys=pltpu.VMEM((block, d), dtype),
    scores=float32(2 * M, block),
    weights=pltpu.VMEM((2 * M, block), dtype),
    d_q=float32(M, d),
    gathered=gathered,
  )


def vmem_bytes(sizes: Sizes, itemsize: int) -> int:
  """Vector memory besides table and gradients: scratch, and every block twice."""
  M, d, R = sizes.score_rows, sizes.width, sizes.block
  rows = 2 * M * d * itemsize + 2 * M * LANES * 4 + R * d * itemsize + M * d * 4
  scores = 2 * M * R * (4 + itemsize)
  staged = (2 * R + SPARE_ROWS) * d * (itemsize + 4)
  blocks = 4 * M * d * itemsize + R * d * (itemsize + 4) + sizes.blocks * R * 4
  return tpu_tiles.COMPILER_BYTES + rows + scores + staged + 2 * blocks


def backward(
  sizes: Sizes,
  q_SHd: jax.Array,
  window_kv_Sd: jax.Array,
  first_slot_G1T: jax.Array,
  lse_G1M: jax.Array,
  delta_G1M: jax.Array,
  d_out_SHd: jax.Array,
  chunk: Chunk | None,
  earlier_d_q_SHd: jax.Array | None,
  *,
  vmem: int,
  interpret: bool,
):
  """One chunk of entries, all rows of the batch in one sequence of S = B Q slots.

  Args:
    sizes: of the kernel.
    q_SHd, window_kv_Sd, d_out_SHd: bfloat16 or float32.
    first_slot_G1T: int32, for every query the first slot of its row that it may see.
    lse_G1M, delta_G1M: float32.
    chunk: entries and lists; None for the window alone. Free list places name row `entries`.
    earlier_d_q_SHd: d_q of the chunks before, whose place the result takes; None for the first
      chunk, which takes the window.
    vmem: bytes that the kernel may use.
    interpret: run without a TPU.

  Returns: d_q in q's dtype; d_window_kv [S, d] float32, None in a later chunk; d_entry_kv
    [B, entries, d] float32, None without entries.
  """
  first, entries = earlier_d_q_SHd is None, chunk is not None
  dtype, d = q_SHd.dtype, sizes.width
  inputs = _Inputs(
    first_slot=first_slot_G1T,
    q=q_SHd,
    d_out=d_out_SHd,
    lse=lse_G1M,
    delta=delta_G1M,
    window=(window_kv_Sd,) * 2 if first else None,
    earlier_d_q=earlier_d_q_SHd,
    lists=None if chunk is None else tpu_tiles.list_inputs(chunk, dtype, d),
    sum_lines=None if chunk is None else tpu_tiles.first_lines(chunk, jnp.float32, d),
  )
  ((d_q, d_window, d_table),) = pl.pallas_call(
    functools.partial(_kernel, sizes=sizes, place_of_chunk=None if chunk is None else chunk.place),
    grid=(sizes.cores, sizes.rows, sizes.tiles_of_core),
    in_specs=(_in_specs(sizes, first, entries),),
    out_specs=(_out_specs(sizes, first, entries),),
    out_shape=(_out_shape(sizes, q_SHd, first, entries),),
    scratch_shapes=(_scratch(sizes, dtype),),
    input_output_aliases={} if first else {5: 0},  # earlier_d_q is the sixth array
    compiler_params=tpu_tiles.compiler_params(vmem),
    interpret=interpret,
    name="sparse_attention_backward",
  )(inputs)
  if entries:
    d_table = d_table.sum(axis=0).reshape(sizes.rows, sizes.entries, d)
  return d_q, tpu_tiles.joined_window(d_window, d) if first else None, d_table


def _in_specs(sizes: Sizes, first: bool, entries: bool) -> _Inputs:
  slots = by_tile(sizes, sizes.tile, sizes.heads, sizes.width)
  statistics = by_tile(sizes, 1, 1, sizes.score_rows)
  return _Inputs(
    first_slot=by_tile(sizes, 1, 1, sizes.tile, memory_space=pltpu.SMEM),
    q=slots,
    d_out=slots,
    lse=statistics,
    delta=statistics,
    window=tpu_tiles.window_blocks(sizes) if first else None,
    earlier_d_q=None if first else slots,
    lists=tpu_tiles.list_blocks(sizes) if entries else None,
    sum_lines=tpu_tiles.main_memory() if entries else None,
  )


def _out_specs(sizes: Sizes, first: bool, entries: bool) -> _Outputs:
  return _Outputs(
    d_q=by_tile(sizes, sizes.tile, sizes.heads, sizes.width),
    d_window=(tpu_tiles.own_window_block(sizes),) * 2 if first else None,
    d_table=tpu_tiles.main_memory() if entries else None,
  )


def _out_shape(sizes: Sizes, q_SHd, first: bool, entries: bool) -> _Outputs:
  d, struct = sizes.width, jax.ShapeDtypeStruct
  window = struct((q_SHd.shape[0] // sizes.window, sizes.window, d), jnp.float32)
  lines = sizes.rows * sizes.entries * tpu_rows.lines_of_row(d, jnp.float32)
  return _Outputs(
    d_q=struct(q_SHd.shape, q_SHd.dtype),
    d_window=(window,) * 2 if first else None,
    d_table=struct((sizes.cores, lines, LANES), jnp.float32) if entries else None,
  )
