"""Sparse attention forward on one TPU core: the table in vector memory, tiles of queries in order.

A tile of T queries walks the blocks of its list (tpu_plan.py). Each block passes three stages: its
rows are gathered out of the table, unpacked and multiplied with the queries of the tile, and taken
into an online softmax whose mask is the bits of the list. The stages of neighbouring blocks stand
in one straight piece of code on two sets of buffers, so that the compiler can lay scalar, vector
and matrix work over one another; this goes on across the borders of tiles. The window comes as two
ordinary blocks of slots. The softmax starts from the sink, or from the result of an earlier chunk
of entries, so that no row is ever empty.

Legend: B rows, Q queries, H heads, d head width, S = B Q slots, T queries of a tile, G tiles of a
row of the batch, J blocks of a list, R places of a block, M = T H score rows of a tile, W window,
L lines of a packed row.
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
  LOG2E,
  ROWS_BY_COLUMNS,
  ROWS_BY_ROWS,
  Chunk,
  Sizes,
  across,
  by_tile,
  dot,
)


class _Inputs(NamedTuple):
  first_slot: Any  # int32 [1, 1, T] scalars
  q: Any  # [T, H, d]
  slots_before: Any  # [W, d]
  slots: Any  # [W, d]
  sink: Any  # float32 [H, 1]; None in a later chunk
  earlier: Any  # (out, lse) of the chunks before; None in the first
  lists: Any  # tpu_tiles.ListInputs; None without entries


class _Scratch(NamedTuple):
  scores: Any  # 2 x float32 [M, R]
  keys: Any  # 2 x [R, d]
  weights: Any  # [M, R]
  total: Any  # float32 [M, d]
  largest: Any  # float32 [M, 128], equal lanes
  denominator: Any  # float32 [M, 128], equal lanes
  gathered: Any  # _Gathered; None without entries


class _Gathered(NamedTuple):
  table: Any  # int32 [entries * L, 128]
  packed: Any  # 2 x int32 [R * L, 128]
  lists: Any  # 2 x int32 [1, 1, R] scalars
  list_semaphores: Any
  table_semaphore: Any


class _Tile:
  """The stages of one tile."""

  def __init__(self, sizes: Sizes, number, inputs: _Inputs, scratch: _Scratch):
    self.sizes, self.number, self.inputs, self.scratch = sizes, number, inputs, scratch
    self.lines = tpu_rows.lines_of_row(sizes.width, inputs.q.dtype)
    if scratch.gathered is not None:
      gathered = scratch.gathered
      ahead = [inputs.lists.ahead[0, 0, i] for i in range(tpu_rows.BlockLists.AHEAD)]
      self.lists = tpu_rows.BlockLists(
        inputs.lists.first_lines, gathered.lists, gathered.list_semaphores, ahead
      )

  def fetch(self, place: int, into: int) -> None:
    """Gathers the block whose list is in `place`."""
    gathered = self.scratch.gathered
    tpu_rows.gather(gathered.table, self.lists[place], gathered.packed[into], self.lines)

  def unpack(self, place: int, into: int) -> None:
    packed, keys = self.scratch.gathered.packed[place], self.scratch.keys[into]
    keys[...] = tpu_rows.unpack(packed, self.sizes.block, self.sizes.width, keys.dtype)

  def score(self, place: int) -> None:
    sizes = self.sizes
    q_Md = self.inputs.q[...].reshape(sizes.score_rows, sizes.width)
    self.scratch.scores[place][...] = dot(q_Md, self.scratch.keys[place][...], ROWS_BY_ROWS)

  def absorb(self, place: int, bias) -> None:
    """Takes scored keys into the softmax; vector work goes one query at a time."""
    sizes, scratch = self.sizes, self.scratch
    scale = sizes.width**-0.5 * LOG2E
    for t in range(sizes.tile):
      rows = pl.ds(t * sizes.heads, sizes.heads)
      scores = scratch.scores[place][rows, :] * scale + bias[t]
      # The statistics fill all lanes, so that nothing has to be spread over them.
      before = scratch.largest[rows, :]
      largest = jnp.maximum(before, scores.max(axis=1, keepdims=True))
      shrink = jnp.exp2(before - largest)
      weights = jnp.exp2(scores - across(largest, sizes.block))
      scratch.largest[rows, :] = largest
      scratch.denominator[rows, :] = scratch.denominator[rows, :] * shrink + weights.sum(
        axis=1, keepdims=True
      )
      scratch.weights[rows, :] = weights.astype(scratch.weights.dtype)
      scratch.total[rows, :] = scratch.total[rows, :] * across(shrink, sizes.width)
    scratch.total[...] += dot(scratch.weights[...], scratch.keys[place][...], ROWS_BY_COLUMNS)

  def begin(self) -> None:
    """The softmax holds the sink, or what earlier chunks gave, as one key of its own."""
    sizes, scratch = self.sizes, self.scratch
    scratch.denominator[...] = jnp.ones_like(scratch.denominator)
    if self.inputs.earlier is None:
      sink_THl = jnp.broadcast_to(
        self.inputs.sink[...][None] * LOG2E, (sizes.tile, sizes.heads, LANES)
      )
      scratch.largest[...] = sink_THl.reshape(sizes.score_rows, LANES)
      scratch.total[...] = jnp.zeros_like(scratch.total)
    else:
      out, lse = self.inputs.earlier
      scratch.largest[...] = tpu_tiles.down(lse[...].reshape(1, sizes.score_rows) * LOG2E)
      total_Md = out[...].reshape(sizes.score_rows, sizes.width)
      scratch.total[...] = total_Md.astype(jnp.float32)

  def absorb_window(self, tile_start) -> None:
    window, keys = self.sizes.window, self.scratch.keys[1]
    keys[:window, :] = self.inputs.slots_before[...]
    keys[window:, :] = self.inputs.slots[...]
    self.score(1)
    self.absorb(1, tpu_tiles.window_bias(self.inputs.first_slot, tile_start, self.sizes))

  def absorb_entries(self) -> None:
    """All blocks of the list; ends with the first two blocks of the next tile gathered."""
    blocks, lists, chosen_by = self.lists.blocks, self.lists, self.inputs.lists.chosen_by
    first = lists.first - self.number * self.sizes.blocks  # of the tile's own blocks
    bias = lambda block: tpu_tiles.entry_bias(
      chosen_by[0, pl.ds(first + block, 1), :], self.sizes.tile
    )

    def pair(i, _):
      lists.wait(0)
      lists.wait(1)
      for place in (0, 1):
        self.fetch(place, into=place)  # two blocks ahead
        self.unpack(1 - place, into=1 - place)  # one block ahead
        self.score(1 - place)  # at the end of a tile for nothing
        self.absorb(place, bias(2 * i + place))
      lists.start(2 * i + 4, 0)
      lists.start(2 * i + 5, 1)
      return 0

    jax.lax.fori_loop(0, blocks // 2, pair, 0)

    @pl.when(blocks % 2 == 1)
    def _():
      self.absorb(0, bias(blocks - 1))
      self.unpack(1, into=0)  # the next tile looks for its first block here
      lists.wait(0)
      self.fetch(0, into=1)
      lists.start(blocks + 2, 0)
      lists.wait(1)
      lists.start(blocks + 3, 1)


def _kernel(inputs: _Inputs, outputs, scratch: _Scratch, *, sizes: Sizes, place_of_chunk):
  core, row, step = (pl.program_id(axis) for axis in range(3))
  number = (row * sizes.cores + core) * sizes.tiles_of_core + step
  tile = _Tile(sizes, number, inputs, scratch)
  if sizes.blocks:

    @pl.when(step == 0)
    def _():  # later tiles find their first blocks gathered by the tile before
      tile.lists.start(0, 0)
      tile.lists.start(1, 1)
      tpu_tiles.copy_table(inputs.lists.table, scratch.gathered, sizes, row, place_of_chunk)
      for place in (0, 1):
        tile.lists.wait(place)
        tile.fetch(place, into=place)
        tile.lists.start(place + 2, place)
      tile.unpack(0, into=0)

    tile.score(0)
  tile.begin()
  if inputs.earlier is None:
    tile.absorb_window((core * sizes.tiles_of_core + step) * sizes.tile)
  if sizes.blocks:
    tile.absorb_entries()

    @pl.when(step == sizes.tiles_of_core - 1)
    def _():  # leaves no copy under way
      tile.lists.wait(0)
      tile.lists.wait(1)

  out, lse = outputs
  shape = (sizes.tile, sizes.heads, sizes.width)
  denominator = scratch.denominator[...]
  total = scratch.total[...] * across(1.0 / denominator, sizes.width)
  out[...] = total.reshape(shape).astype(out.dtype)
  lse_Ml = (scratch.largest[...] + jnp.log2(denominator)) / LOG2E
  lse[...] = lse_Ml.T[:1].reshape(1, 1, sizes.score_rows)


def _scratch(sizes: Sizes, dtype) -> _Scratch:
  M, d, block = sizes.score_rows, sizes.width, sizes.block
  float32 = lambda *shape: pltpu.VMEM(shape, jnp.float32)
  gathered = None
  if sizes.blocks:
    lines = tpu_rows.lines_of_row(d, dtype)
    words = lambda rows: pltpu.VMEM((rows * lines, LANES), jnp.int32)
    gathered = _Gathered(
      table=words(sizes.entries),
      packed=(words(sizes.block),) * 2,
      lists=(pltpu.SMEM((1, 1, sizes.block), jnp.int32),) * 2,
      list_semaphores=pltpu.SemaphoreType.DMA((2,)),
      table_semaphore=pltpu.SemaphoreType.DMA,
    )
  return _Scratch(
    scores=(float32(M, block),) * 2,
    keys=(pltpu.VMEM((block, d), dtype),) * 2,
    weights=pltpu.VMEM((M, block), dtype),
    total=float32(M, d),
    largest=float32(M, LANES),
    denominator=float32(M, LANES),
    gathered=gathered,
  )


def vmem_bytes(sizes: Sizes, itemsize: int) -> int:
  """Vector memory besides the table: scratch, and every block twice (one used, one under way)."""
  M, d, R = sizes.score_rows, sizes.width, sizes.block
  scratch = 2 * (M * 4 + d * itemsize) * R + M * R * itemsize + M * (d + 2 * LANES) * 4
  packed = 2 * R * d * itemsize
  blocks = (3 * M + R) * d * itemsize + sizes.blocks * R * 4
  return tpu_tiles.COMPILER_BYTES + scratch + packed + 2 * blocks


def forward(
  sizes: Sizes,
  q_SHd: jax.Array,
  window_kv_Sd: jax.Array,
  first_slot_G1T: jax.Array,
  sink_H: jax.Array,
  chunk: Chunk | None,
  earlier: tuple[jax.Array, jax.Array] | None,
  *,
  vmem: int,
  interpret: bool,
) -> tuple[jax.Array, jax.Array]:
  """One chunk of entries, all rows of the batch in one sequence of S = B Q slots.

  Args:
    sizes: of the kernel.
    q_SHd, window_kv_Sd: bfloat16 or float32.
    first_slot_G1T: int32, for every query the first slot of its row that it may see.
    sink_H: float32.
    chunk: entries and lists; None for the window alone.
    earlier: what the chunks before gave, whose place the result takes; None for the first chunk,
      which takes window and sink.
    vmem: bytes that the kernel may use.
    interpret: run without a TPU.

  Returns: out [S, H, d] in q's dtype and lse [B G, 1, M] float32.
  """
  first, entries = earlier is None, chunk is not None
  inputs = _Inputs(
    first_slot=first_slot_G1T,
    q=q_SHd,
    slots_before=window_kv_Sd,
    slots=window_kv_Sd,
    sink=sink_H[:, None] if first else None,
    earlier=earlier,
    lists=None if chunk is None else tpu_tiles.list_inputs(chunk, q_SHd.dtype, sizes.width),
  )
  statistics = (sizes.rows * sizes.tiles, 1, sizes.score_rows)
  out_shape = (
    jax.ShapeDtypeStruct(q_SHd.shape, q_SHd.dtype),
    jax.ShapeDtypeStruct(statistics, jnp.float32),
  )
  return pl.pallas_call(
    functools.partial(_kernel, sizes=sizes, place_of_chunk=None if chunk is None else chunk.place),
    grid=(sizes.cores, sizes.rows, sizes.tiles_of_core),
    in_specs=(_in_specs(sizes, first, entries),),
    out_specs=(_results(sizes),),
    out_shape=(out_shape,),
    scratch_shapes=(_scratch(sizes, q_SHd.dtype),),
    input_output_aliases={} if first else {4: 0, 5: 1},  # out and lse of the chunks before
    compiler_params=tpu_tiles.compiler_params(vmem),
    interpret=interpret,
    name="sparse_attention_forward",
  )(inputs)[0]


def _results(sizes: Sizes):
  """Blocks of out and lse."""
  out = by_tile(sizes, sizes.tile, sizes.heads, sizes.width)
  return out, by_tile(sizes, 1, 1, sizes.score_rows)


def _in_specs(sizes: Sizes, first: bool, entries: bool) -> _Inputs:
  slots_before, slots = tpu_tiles.window_blocks(sizes)
  return _Inputs(
    first_slot=by_tile(sizes, 1, 1, sizes.tile, memory_space=pltpu.SMEM),
    q=by_tile(sizes, sizes.tile, sizes.heads, sizes.width),
    slots_before=slots_before,
    slots=slots,
    sink=pl.BlockSpec((sizes.heads, 1), lambda *_: (0, 0)) if first else None,
    earlier=None if first else _results(sizes),
    lists=tpu_tiles.list_blocks(sizes) if entries else None,
  )
