"""Backward of sparse attention on Hopper: a Mosaic GPU kernel, then sums of its rows per key.

A program of the kernel walks over the queries `program, program + programs, ...` of a chunk. A
query and its output gradient, 64 heads each, stay in shared memory; its keys pass through 64 at a
time, those of the window first, then its entries. Three warpgroups:

  first    S = Q K^T, P = exp(S - lse);          then columns   0 .. 255 of everything below
  second   dP = dO K^T, dS = P (dP - delta);     then columns 256 .. 511
  gather   copies keys; blocks of entries that the query did not choose are never copied

  dQ += dS K, in registers over all blocks;  dK = P^T dO + dS^T Q, one row for each (query, key)

Keys are their own values, so dK is the whole contribution of the query to the gradient of a row.
Contributions leave as bfloat16 rows, with the heads already summed, for a chunk of queries at a
time; `reduce_rows` adds them up in float32 and in a fixed order. Shared memory is full (224 of 227
KB): keys have one buffer, which is freed as soon as dQ is done, so that the next keys arrive during
dK; they are used by quarters as they arrive.

Inherent roundings to bfloat16: P and dS, operands of the tensor cores (P once, for both
warpgroups), and the contribution rows, halving what is written and read again. Sums are float32.

Legend: S queries of all rows, M entries of all rows, H = 64 heads, d = 512 channels, K chosen
entries, C queries of a chunk, R contribution rows of a chunk, k = 64 keys of a block, D blocks of
keys of a chunk, n columns of a piece, T a warpgroup's row numbers.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.sparse_attention import (
  hopper_backward_ptx,
  hopper_forward,
  hopper_ptx,
  reduce_rows,
)
from deepseek_jax.ops.sparse_attention.hopper_forward import HEADS, KEYS, LOG2E, WIDTH

QUARTER, HALF = WIDTH // 4, WIDTH // 2  # columns that arrive together; columns of a warpgroup
# Registers per thread. The sum may not exceed the 3 x 168 of the launch: 240 + 240 + 32 hangs.
REGISTERS = {"multiply": 232, "gather": 40}
# Barriers of the keys: their quarters are full, then their halves are empty.
FULL, EMPTY = 0, 4
ARRIVALS = (128,) * 4 + (4,) * 2  # a copying thread each; a warp each
WINDOW, ENTRY = 1, 2  # tables that a block is copied from; 0 would be the queries
Q, D_OUT, KEY = 0, 1, 2  # tiles in shared memory
# Columns of dK that each warpgroup multiplies, then stores, at a time. Measured on an H200, 8,192
# queries: 2 x 128 staggered 3.61 to 3.70 ms, not staggered 3.69 to 3.73, 64 + 64 + 128 3.79; pieces
# of 64, each stored while the next is multiplied, 3.78 to 3.93.
PIECES = (128, 128)

_accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class _Refs(NamedTuple):
  """Arrays in global memory, then scratch of a program."""

  offset_1: Any
  q_SHd: Any
  d_out_SHd: Any
  lse_SH: Any
  delta_SH: Any
  window_kv_Sd: Any
  first_S: Any
  entry_kv_Md: Any | None
  selection_SK: Any | None
  blocks_S: Any | None
  d_q_SHd: Any
  contributions_Dkd: Any
  tiles_3kd: Any  # the query, its output gradient, keys
  p_2Hk: Any
  ds_2Hk: Any
  key_barriers: Any
  q_full: Any
  q_empty: Any
  p_full: Any
  ds_full: Any
  p_empty: Any
  ahead: Any


class _Walk(NamedTuple):
  """What all warpgroups agree on."""

  refs: _Refs
  pieces: ModuleType
  program: Any
  programs: int
  queries: int  # of the chunk
  window: int

  @property
  def window_blocks(self) -> int:
    return self.window // KEYS

  @property
  def entry_blocks(self) -> int:
    """Blocks of entries that a query has room for."""
    return 0 if self.refs.selection_SK is None else self.refs.selection_SK.shape[1] // KEYS

  def blocks(self, query):
    """Blocks of keys that a query has."""
    if self.refs.blocks_S is None:
      return self.window_blocks + self.pieces.opaque_zero()  # an unrolled loop needs registers
    return self.window_blocks + self.refs.blocks_S[query]

  def over_queries(self, body, carry):
    """body(number in the chunk, query, its blocks, carry) -> carry; blocks are read one ahead."""
    end = self.refs.q_SHd.shape[0]
    offset = self.refs.offset_1[0]
    queries = jnp.minimum(self.queries, end - offset)
    turns = (queries - self.program + (self.programs - 1)) // self.programs
    blocks = lambda number: self.blocks(jnp.minimum(offset + number, end - 1))

    def turn(i, carry):
      now, carry = carry
      number = self.program + i * self.programs
      ahead = blocks(number + self.programs)
      return ahead, body(number, offset + number, now, carry)

    return lax.fori_loop(0, turns, turn, (blocks(self.program), carry))[1]


# The gather.


def _gather(walk: _Walk):
  refs, pieces = walk.refs, walk.pieces
  plgpu.set_max_registers(REGISTERS["gather"], action="decrease")
  tables = [t for t in (refs.q_SHd, refs.window_kv_Sd, refs.entry_kv_Md) if t is not None]
  offsets_T = pieces.row_offsets()

  def query(_, query, blocks, count):
    def block(number, rows_T):
      # The row numbers of the next block are on their way while this one waits for its place.
      ahead_T = _rows_of_block(walk, query, number + 1, blocks, offsets_T)
      table = jnp.where(number < walk.window_blocks, WINDOW, ENTRY)
      for half in range(2):
        pieces.wait(refs.key_barriers, EMPTY + half, _parity(count + number))
        pieces.copy_half(
          tables, table, rows_T, refs.tiles_3kd, jnp.int32(KEY), half, refs.key_barriers,
          jnp.int32(FULL),
        )  # fmt: skip

      @pl.when(number == 0)
      def _():  # the first keys of a query were copied while the query before was still in use
        plgpu.barrier_wait(refs.q_empty)
        plgpu.copy_gmem_to_smem(refs.q_SHd.at[query], refs.tiles_3kd.at[Q], refs.q_full)
        plgpu.copy_gmem_to_smem(refs.d_out_SHd.at[query], refs.tiles_3kd.at[D_OUT], refs.q_full)

      return ahead_T

    lax.fori_loop(0, blocks, block, _rows_of_block(walk, query, 0, blocks, offsets_T))
    return count + blocks

  count = walk.over_queries(query, jnp.int32(0))
  for half in range(2):  # all that was copied has been used: the program may end
    pieces.wait(refs.key_barriers, EMPTY + half, _parity(count))
  plgpu.barrier_wait(refs.q_empty)


def _rows_of_block(walk: _Walk, query, number, blocks, offsets_T):
  """Row numbers of a block of keys; -1 for keys that the query does not see."""
  slot_T = query + 1 - walk.window + number * KEYS + offsets_T
  rows_T = jnp.where(slot_T >= walk.refs.first_S[query], slot_T, -1)
  if walk.refs.selection_SK is None:
    return rows_T
  entry_block = number - walk.window_blocks
  chosen = jnp.int32((entry_block >= 0) & (number < blocks))
  return walk.pieces.chosen_rows(walk.refs.selection_SK, query, entry_block, chosen, rows_T)


def _parity(count):
  return lax.bitwise_and(count, jnp.int32(1))


# The products.


class _Block(NamedTuple):
  """A block of keys, for the warpgroup that works on one side of it."""

  walk: _Walk
  side: int
  query: Any
  number: Any  # in the query
  count: Any  # of blocks since the start of the program
  place: Any  # of its rows in the contributions
  zero: Any  # in every index of a tile: see opaque_zero

  @property
  def turn(self):
    return _parity(self.count)

  def tile(self, which: int, column: int, width: int):
    """Columns of a tile in shared memory."""
    return self.walk.refs.tiles_3kd.at[which + self.zero, :, pl.ds(column, width)]

  def free_keys(self):
    self.walk.pieces.arrive(self.walk.refs.key_barriers, EMPTY + self.side)


def _multiply(walk: _Walk, side: int):
  refs, pieces = walk.refs, walk.pieces
  plgpu.set_max_registers(REGISTERS["multiply"], action="increase")
  pieces.arrive(refs.key_barriers, EMPTY + side)
  plgpu.barrier_arrive(refs.q_empty)
  for turn in range(2):
    plgpu.barrier_arrive(refs.p_empty.at[turn])
  all_blocks = walk.entry_blocks + walk.window_blocks

  def query(number, query, blocks, count):
    statistic_SH = refs.delta_SH if side else refs.lse_SH
    statistic_H = plgpu.load(statistic_SH.at[query], layout=hopper_ptx.PER_ROW, optimized=False)
    plgpu.barrier_wait(refs.q_full)

    def over_blocks(d_q_Hn_ref):
      def block(b, _):
        window = b < walk.window_blocks
        # Contributions of the entries come first, as `reduce_rows` wants them.
        in_query = jnp.where(window, walk.entry_blocks + b, b - walk.window_blocks)
        place = number * all_blocks + in_query
        one = _Block(walk, side, query, b, count + b, place, pieces.opaque_zero())
        (_score_gradients if side else _probabilities)(one, statistic_H)
        plgpu.wgmma(d_q_Hn_ref, refs.ds_2Hk.at[one.turn], one.tile(KEY, HALF * side, HALF))
        _contribute(one)

      lax.fori_loop(0, blocks, block, None)
      return d_q_Hn_ref[...]

    d_q_Hn = pl.run_scoped(over_blocks, _accumulator((HEADS, HALF), jnp.float32))
    plgpu.barrier_arrive(refs.q_empty)
    pieces.store_rows(d_q_Hn.astype(refs.d_q_SHd.dtype), refs.d_q_SHd, query, HALF * side)
    return count + blocks

  walk.over_queries(query, jnp.int32(0))
  if side == 0:  # leaves every barrier waited for as often as it was completed
    for turn in range(2):
      plgpu.barrier_wait(refs.p_empty.at[turn])


def _probabilities(block: _Block, lse_H):
  """P of a block to shared memory; returns when dS is there too."""
  walk, refs = block.walk, block.walk.refs
  skip = refs.first_S[block.query] - (block.query + 1 - walk.window)
  entry_block = block.number - walk.window_blocks

  def valid_keys():
    return walk.pieces.valid_keys(
      hopper_ptx.KeyMask(
        refs.selection_SK, block.query, entry_block, entry_block >= 0, skip - block.number * KEYS
      )
    )

  x_Hk, *words = _multiply_keys(block, Q, valid_keys)
  x_Hk = walk.pieces.mask_scores(x_Hk, *words)
  p_Hk = jnp.exp2(x_Hk * (WIDTH**-0.5 * LOG2E) - _along_rows(lse_H * LOG2E, x_Hk.shape))
  plgpu.barrier_wait(refs.p_empty.at[block.turn])
  refs.p_2Hk[block.turn] = p_Hk.astype(refs.p_2Hk.dtype)
  plgpu.commit_smem()
  plgpu.barrier_arrive(refs.p_full)
  plgpu.barrier_wait(refs.ds_full)


def _score_gradients(block: _Block, delta_H):
  """dS of a block, with the scale of the scores, to shared memory."""
  refs = block.walk.refs
  x_Hk, *_ = _multiply_keys(block, D_OUT, tuple)
  plgpu.barrier_wait(refs.p_full)
  p_Hk = plgpu.load(refs.p_2Hk.at[block.turn], layout=hopper_ptx.MATRIX, optimized=False)
  ds_Hk = p_Hk.astype(jnp.float32) * (x_Hk - _along_rows(delta_H, x_Hk.shape)) * WIDTH**-0.5
  refs.ds_2Hk[block.turn] = ds_Hk.astype(refs.ds_2Hk.dtype)
  plgpu.commit_smem()
  plgpu.barrier_arrive(refs.ds_full)


def _multiply_keys(block: _Block, left: int, meanwhile):
  """left K^T [H, k], quarter by quarter as the keys arrive, and what `meanwhile` returns."""
  walk, refs = block.walk, block.walk.refs

  def multiply(x_Hk_ref):
    for quarter in range(4):
      walk.pieces.wait(refs.key_barriers, FULL + quarter, _parity(block.count))
      walk.pieces.fence_async_proxy()
      left_Hn, keys_kn = (block.tile(i, QUARTER * quarter, QUARTER) for i in (left, KEY))
      plgpu.wgmma(x_Hk_ref, left_Hn, keys_kn.transpose((1, 0)))
    other = meanwhile()
    return x_Hk_ref[...], *other

  return pl.run_scoped(multiply, _accumulator((HEADS, KEYS), jnp.float32))


def _along_rows(x_H, shape):
  return lax.broadcast_in_dim(x_H, shape, [0])


def _contribute(block: _Block):
  """Frees the keys when dQ is done, then each piece of dK is multiplied, waited for and stored.

  The second warpgroup starts when the first has its first piece, so that one stores while the other
  multiplies.
  """
  refs, column = block.walk.refs, HALF * block.side
  plgpu.wgmma_wait(0)
  block.free_keys()
  if block.side == 1:
    plgpu.barrier_wait(refs.ahead)
  for i, width in enumerate(PIECES):
    x_kn = block.walk.pieces.finish(_start_piece(block, column, width))
    if block.side == 0 and i == 0:
      plgpu.barrier_arrive(refs.ahead)
    if i == len(PIECES) - 1:
      plgpu.barrier_arrive(refs.p_empty.at[block.turn])
    _store_piece(block, x_kn, column)
    column += width


def _start_piece(block: _Block, column: int, width: int):
  """P^T dO + dS^T Q for some columns."""
  refs = block.walk.refs
  lefts = [x_2Hk.at[block.turn] for x_2Hk in (refs.p_2Hk, refs.ds_2Hk)]
  rights = [block.tile(tile, column, width) for tile in (D_OUT, Q)]
  return block.walk.pieces.start_transposed(lefts, rights)


def _store_piece(block: _Block, x_kn, column: int):
  contributions = block.walk.refs.contributions_Dkd
  x_kn = x_kn.astype(contributions.dtype)
  block.walk.pieces.store_rows(x_kn, contributions, block.place, column)


# The kernel.


def _body(*refs, with_entries: bool, **walk):
  if not with_entries:
    refs = (*refs[:7], None, None, None, *refs[7:])
  walk = _Walk(_Refs(*refs), program=lax.axis_index("program"), **walk)
  walk.pieces.init_barriers(walk.refs.key_barriers, ARRIVALS)
  warpgroup = lax.axis_index("warpgroup")
  roles = (functools.partial(_multiply, side=0), functools.partial(_multiply, side=1), _gather)
  for number, role in enumerate(roles):
    pl.when(warpgroup == number)(functools.partial(role, walk))


def _scratch(dtype, pieces: ModuleType):
  tiled = functools.partial(plgpu.SMEM, dtype=dtype, transforms=hopper_ptx.TILED)
  return [
    tiled((3, KEYS, WIDTH)),
    tiled((2, HEADS, KEYS)),
    tiled((2, HEADS, KEYS)),
    pieces.barriers(len(ARRIVALS)),
    plgpu.Barrier(num_arrivals=2),
    plgpu.Barrier(num_arrivals=2),
    plgpu.Barrier(),
    plgpu.Barrier(),
    plgpu.Barrier(num_arrivals=2, num_barriers=2),
    plgpu.Barrier(),
  ]


def contributions(
  offset_1: jax.Array,
  arrays: dict[str, Any],
  d_q_SHd_ref,
  *,
  queries: int,
  top_k: int,
  programs: int,
  pieces: ModuleType,
  interpret: Any,
  window: int,
) -> jax.Array:
  """Rows of dK for the queries offset ... offset + queries, and their dQ, written to the Ref.

  Args:
    offset_1: int32, first query; the last chunk may reach past S.
    arrays: inputs by their names in _Refs; those of the entries may be absent together.
    d_q_SHd_ref: bfloat16; rows of other queries stay as they are.
    queries: C.
    top_k: K, 0 without entries.
    programs, pieces, interpret, window: see backward.

  Returns: bfloat16 [C (K + window), d], K entries before the window. Rows of blocks of entries that
    a query did not choose, and of queries past S, are not written.
  """
  body = functools.partial(
    _body, with_entries=top_k > 0, pieces=pieces, programs=programs, queries=queries, window=window
  )
  blocks = queries * (top_k + window) // KEYS
  kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((blocks, KEYS, WIDTH), jnp.bfloat16),
    scratch_types=_scratch(jnp.bfloat16, pieces),
    grid=(programs,),
    grid_names=("program",),
    num_threads=3,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      unsafe_no_auto_barriers=True,
      lowering_semantics=plgpu.LoweringSemantics.Lane,
    ),
    interpret=interpret,
  )
  inputs = [arrays[name] for name in _Refs._fields if name in arrays]
  return kernel(offset_1, *inputs, d_q_SHd_ref).reshape(-1, WIDTH)


def backward(
  q_SHd: jax.Array,
  window_kv_Sd: jax.Array,
  entry_kv_Md: jax.Array | None,
  selection_SK: jax.Array | None,
  first_S: jax.Array,
  inverse: reduce_rows.Inverse | None,
  lse_SH: jax.Array,
  delta_SH: jax.Array,
  d_out_SHd: jax.Array,
  *,
  window: int,
  chunk: int,
  programs: int | None = None,
  pieces: ModuleType = hopper_backward_ptx,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Gradients of the queries, the window keys and the entries; the same bits in every run.

  p = exp(s - lse);  ds = p (dp - delta) / sqrt(d);  d_q = sum ds k;  d_k = sum ds q + p d_out
  with s = q . k / sqrt(d) and dp = d_out . k. Rows of the batch stand one after another: slots and
  entries are numbered through. Keys that a query does not see are not read, nor is their gradient
  touched by it.

  Args:
    q_SHd: bfloat16 queries, 64 heads of 512 channels.
    window_kv_Sd: bfloat16, the key of every slot; query s sees slots first_S[s] ... s of the last
      `window`.
    entry_kv_Md: bfloat16 entries; None for window only, and then selection_SK and inverse too.
    selection_SK: int32 entry numbers, -1 at the end; K a multiple of 64.
    first_S: int32 first slot that the window may reach; it may lie behind the query.
    inverse: reduce_rows.invert(selection_SK, M, chunk=chunk, keys_per_query=K + window).
    lse_SH: float32 natural logarithm of the softmax denominator, the sink's part included.
    delta_SH: float32 sum_d out d_out, less the gradient of lse.
    d_out_SHd: bfloat16.
    window: slots, a multiple of 64.
    chunk: queries whose contributions exist at a time, K + window KiB each; of a multiple of the
      number of multiprocessors none is idle at the end.
    programs: multiprocessors to use; None takes all.
    pieces, interpret: hopper_backward_plain and plgpu.InterpretGPUParams() run it on a CPU.

  Returns: d_q_SHd bfloat16; d_window_kv_Sd float32; d_entry_kv_Md float32, None without entries.

  Raises: NotImplementedError for other heads, widths, dtypes or windows.
  """
  hopper_forward.require(q_SHd, window, window_kv_Sd if entry_kv_Md is None else entry_kv_Md)
  queries = min(chunk, q_SHd.shape[0])
  arrays, top_k = _inputs(
    q_SHd, d_out_SHd, lse_SH, delta_SH, window_kv_Sd, first_S, entry_kv_Md, selection_SK
  )
  kernel = functools.partial(
    contributions, queries=queries, top_k=top_k, programs=_programs(programs, queries),
    pieces=pieces, interpret=interpret, window=window,
  )  # fmt: skip
  band = functools.partial(
    reduce_rows.add_window_band, window=window, chunk=queries, keys_per_query=top_k + window,
    first_key=top_k,
  )  # fmt: skip
  d_q_SHd_ref = jax.new_ref(lax.empty(q_SHd.shape, q_SHd.dtype))

  def add_chunk(sums, offset_and_inverse):
    (d_window_kv_Sd, d_entry_kv_Md), (offset, inverse) = sums, offset_and_inverse
    rows_Rd = kernel(offset[None], arrays, d_q_SHd_ref)
    if top_k:
      d_entry_kv_Md = reduce_rows.add_by_entry(inverse, rows_Rd, d_entry_kv_Md)
    return (band(offset, rows_Rd, d_window_kv_Sd), d_entry_kv_Md), None

  d_window_kv_Sd = jnp.zeros(window_kv_Sd.shape, jnp.float32)
  d_entry_kv_Md = None if entry_kv_Md is None else jnp.zeros(entry_kv_Md.shape, jnp.float32)
  offset_C = jnp.arange(0, q_SHd.shape[0], chunk, dtype=jnp.int32)
  (d_window_kv_Sd, d_entry_kv_Md), _ = lax.scan(
    add_chunk, (d_window_kv_Sd, d_entry_kv_Md), (offset_C, inverse if top_k else None)
  )
  return jax.freeze(d_q_SHd_ref), d_window_kv_Sd, d_entry_kv_Md


def _inputs(q_SHd, d_out_SHd, lse_SH, delta_SH, window_kv_Sd, first_S, entry_kv_Md, selection_SK):
  """Inputs of the kernel by name, and K, which is 0 when there is no entry to choose."""
  arrays = {
    "q_SHd": q_SHd, "d_out_SHd": d_out_SHd, "lse_SH": lse_SH, "delta_SH": delta_SH,
    "window_kv_Sd": window_kv_Sd, "first_S": first_S,
  }  # fmt: skip
  if entry_kv_Md is None or not entry_kv_Md.size * selection_SK.size:
    return arrays, 0
  # A block that starts with -1 is all -1.
  blocks_S = jnp.sum(selection_SK[:, ::KEYS] >= 0, axis=1, dtype=jnp.int32)
  entries = {"entry_kv_Md": entry_kv_Md, "selection_SK": selection_SK, "blocks_S": blocks_S}
  return arrays | entries, selection_SK.shape[1]


def _programs(programs: int | None, queries: int) -> int:
  if programs is None:
    programs = dispatch.device().cores or hopper_forward.MULTIPROCESSORS
  return min(programs, queries)
