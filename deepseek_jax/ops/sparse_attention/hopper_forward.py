"""Forward of sparse attention on Hopper: one Mosaic GPU program for each multiprocessor.

A program walks over the queries `program, program + programs, ...`. Each of its four warpgroups has
one job:

  scores   keeps 3/4 of the query in registers: S = Q K^T, online softmax; publishes P and alpha
  left     accumulates output columns   0 .. 255 in registers: O = alpha O + P V
  right    the same for output columns 256 .. 511
  gather   copies rows into a ring of three slots of 64 rows

A query passes through the ring as blocks: its own 64 heads, then the keys of its window, then its
entries, 64 at a time; a slot holds keys for the scores and values for both outputs. Blocks of
entries that the query did not choose are never copied.

Two things make the speed. P and alpha are published at once, so that the outputs rescale early, but
they multiply only when `go` says that the scores of the next block are done: the tensor cores then
work on P V while the softmax of that block runs. And the rows of a block arrive while earlier ones
are worked on: a slot is freed by halves, as each output is done with its columns.

Legend: S queries of all rows, M entries of all rows, H = 64 heads, d = 512 channels, K chosen
entries, k = 64 keys of a block, n columns, L ring slots, T row numbers as a warpgroup holds them.
"""

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.sparse_attention import hopper_ptx

HEADS, WIDTH, KEYS = 64, 512, 64  # one query is 64 rows too: a block like any other
SLOTS = 3  # of 64 KB; 227 KB of shared memory hold no fourth
CHUNKS, IN_REGISTERS = 8, 6  # 64-column chunks of the query; more than 6 in registers spill
# Registers per thread, 512 in all. A gather needs few, and ptxas must see no spills.
REGISTERS = {"scores": 160, "output": 160, "gather": 32}
MULTIPROCESSORS = 132  # of an H200, for compiling without one; another number is only slower
LOG2E = math.log2(math.e)
# The running maximum stays while scores grow by less than 2^8 beyond it: most blocks then rescale
# nothing, and probabilities up to 256 have the same precision in bfloat16 and float32.
GROWTH = 8.0
LARGEST = 1e30  # the sink is clipped to it: infinities have no differences
# Barriers of the ring: 4 quarters of every slot are full, then 2 halves of every slot are empty.
FULL, EMPTY = 0, 4 * SLOTS
ARRIVALS = (128,) * (4 * SLOTS) + (4,) * (2 * SLOTS)  # a copying thread each; a warp each
QUERY, WINDOW, ENTRY = 0, 1, 2  # tables that a block is copied from


class _Refs(NamedTuple):
  """Arrays in global memory, then scratch of a program."""

  q_SHd: Any
  window_kv_Sd: Any
  first_S: Any
  sink_H: Any
  entry_kv_Md: Any | None
  selection_SK: Any | None
  blocks_S: Any | None
  out_SHd: Any
  lse_SH: Any
  ring_Lkd: Any
  p_2Hk: Any  # probabilities of two blocks
  q_rest: Any  # chunks of the query that have no registers
  per_head: Any  # alpha of two blocks, 1 / sum, lse
  ring_barriers: Any
  p_ready: Any
  p_free: Any
  go: Any
  sum_ready: Any
  sum_free: Any


class _Walk(NamedTuple):
  """What all warpgroups agree on."""

  refs: _Refs
  pieces: ModuleType
  program: Any
  programs: int
  window: int

  @property
  def window_blocks(self) -> int:
    return self.window // KEYS

  def over_queries(self, body, carry):
    """body(query, blocks of keys, carry) -> carry."""
    queries = self.refs.q_SHd.shape[0]
    turns = (queries - self.program + (self.programs - 1)) // self.programs

    def turn(number, carry):
      query = self.program + number * self.programs
      return body(query, self._key_blocks(query), carry)

    return lax.fori_loop(0, turns, turn, carry)

  def _key_blocks(self, query):
    if self.refs.blocks_S is None:
      return jnp.int32(self.window_blocks)
    return self.window_blocks + self.refs.blocks_S[query]


class _Slot(NamedTuple):
  """Place in the ring: blocks so far, modulo two rounds; one register instead of two."""

  count: Any

  @property
  def parity(self):
    """Of the barriers there."""
    return (self.count >= SLOTS).astype(jnp.int32)

  @property
  def number(self):
    return jnp.where(self.count >= SLOTS, self.count - SLOTS, self.count)

  def next(self) -> "_Slot":
    return _Slot(jnp.where(self.count == 2 * SLOTS - 1, 0, self.count + 1))


def _first_slot() -> _Slot:
  return _Slot(jnp.int32(0))


# The gather.


def _gather(walk: _Walk):
  refs, pieces = walk.refs, walk.pieces
  plgpu.set_max_registers(REGISTERS["gather"], action="decrease")
  tables = [t for t in (refs.q_SHd, refs.window_kv_Sd, refs.entry_kv_Md) if t is not None]
  offsets_T = pieces.row_offsets()

  def query(query, blocks, carry):
    slot, rows_T = carry
    first = refs.first_S[query]

    def block(number, carry):  # 0 is the query itself
      slot, rows_T = carry
      ahead_T = _rows_of_block(walk, query, blocks, first, number + 1, offsets_T)
      table = jnp.where(number == 0, QUERY, jnp.where(number <= walk.window_blocks, WINDOW, ENTRY))
      for half in range(2):
        pieces.wait(refs.ring_barriers, EMPTY + 2 * slot.number + half, slot.parity)
        pieces.copy_half(
          tables, table, rows_T, refs.ring_Lkd, slot.number, half,
          refs.ring_barriers, FULL + 4 * slot.number,
        )  # fmt: skip
      return slot.next(), ahead_T

    return lax.fori_loop(0, blocks + 1, block, (slot, rows_T))

  slot, _ = walk.over_queries(query, (_first_slot(), walk.program * HEADS + offsets_T))
  for _ in range(SLOTS):  # all that was copied has been used: the program may end
    for half in range(2):
      pieces.wait(refs.ring_barriers, EMPTY + 2 * slot.number + half, slot.parity)
    slot = slot.next()


def _rows_of_block(walk: _Walk, query, blocks, first, number, offsets_T):
  """Row numbers of a block of the query, or of the next query itself after the last block."""
  refs = walk.refs
  over = number > blocks
  following = jnp.minimum(query + walk.programs, refs.q_SHd.shape[0] - 1)
  window_start = query + 1 - walk.window + (number - 1) * KEYS
  rows_T = jnp.where(over, following * HEADS, window_start) + offsets_T
  rows_T = jnp.where(rows_T >= jnp.where(over, 0, first), rows_T, -1)
  if refs.selection_SK is None:
    return rows_T
  entry_block = number - 1 - walk.window_blocks
  chosen = ((entry_block >= 0) & jnp.logical_not(over)).astype(jnp.int32)
  return walk.pieces.chosen_rows(refs.selection_SK, query, entry_block, chosen, rows_T)


# The scores.


def _scores(walk: _Walk):
  refs, pieces = walk.refs, walk.pieces
  plgpu.set_max_registers(REGISTERS["scores"], action="increase")
  for barrier in range(2 * SLOTS):
    pieces.arrive(refs.ring_barriers, EMPTY + barrier)

  def query(query, blocks, carry):
    slot, turn = carry
    chunks = _take_query(walk, slot)
    # The sink is a first key without a value: the largest score, and a sum of 1 over 8 columns.
    largest_H = plgpu.load(refs.sink_H, layout=hopper_ptx.PER_ROW, optimized=False) * LOG2E
    sum_H8 = plgpu.layout_cast(jnp.full((HEADS, 8), 1 / 8, jnp.float32), hopper_ptx.MATRIX)
    skip = refs.first_S[query] - (query + 1 - walk.window)

    def block(number, carry):
      slot, turn, largest_H, sum_H8 = carry
      entry_block = number - walk.window_blocks
      chosen = entry_block >= 0
      mask = hopper_ptx.KeyMask(
        refs.selection_SK, query, entry_block, chosen.astype(jnp.int32), skip - number * KEYS
      )
      full = (refs.ring_barriers, FULL + 4 * slot.number, slot.parity)
      keys_kd = refs.ring_Lkd.at[slot.number]
      x_Hk = pieces.score_block(chunks, refs.q_rest, keys_kd, full, mask)

      # Tensor cores serve the scores first: P V of the block before runs during the softmax below.
      @pl.when(number > 0)
      def _():
        plgpu.barrier_arrive(refs.go.at[1 - turn])

      largest_H, sum_H8 = _softmax(walk, x_Hk, turn, largest_H, sum_H8)
      return slot.next(), 1 - turn, largest_H, sum_H8

    carry = (slot.next(), turn, largest_H, sum_H8)
    slot, turn, largest_H, sum_H8 = lax.fori_loop(0, blocks, block, carry)
    plgpu.barrier_arrive(refs.go.at[1 - turn])
    _publish_sum(walk, query, largest_H, sum_H8)
    return slot, turn

  walk.over_queries(query, (_first_slot(), jnp.int32(0)))
  for turn in range(2):
    plgpu.barrier_wait(refs.p_free.at[turn])
  plgpu.barrier_wait(refs.sum_free)
  plgpu.wait_smem_to_gmem(0)


def _take_query(walk: _Walk, slot: _Slot):
  """Moves the query out of the ring: the first chunks to registers, the rest to scratch."""
  refs, chunks = walk.refs, []
  for j in range(CHUNKS):
    if j % 2 == 0:
      walk.pieces.wait(refs.ring_barriers, FULL + 4 * slot.number + j // 2, slot.parity)
    chunk = plgpu.load(
      refs.ring_Lkd.at[slot.number, :, pl.ds(KEYS * j, KEYS)], layout=hopper_ptx.MATRIX
    )
    if j < IN_REGISTERS:
      chunks.append(chunk)
    else:
      refs.q_rest[j - IN_REGISTERS] = chunk
  plgpu.commit_smem()
  for half in range(2):
    walk.pieces.arrive(refs.ring_barriers, EMPTY + 2 * slot.number + half)
  return chunks


def _softmax(walk: _Walk, x_Hk, turn, largest_H, sum_H8):
  """One step of the online softmax, in powers of 2; publishes P and alpha."""
  refs, scale = walk.refs, WIDTH**-0.5 * LOG2E
  before_H, block_H = largest_H, x_Hk.max(1) * scale
  largest_H = jnp.where(block_H > before_H + GROWTH, block_H, before_H)
  alpha_H = jnp.exp2(before_H - largest_H)
  p_Hk = jnp.exp2(x_Hk * scale - _along_rows(largest_H, x_Hk.shape))
  sum_H8 = sum_H8 * _along_rows(alpha_H, sum_H8.shape)
  for j in range(KEYS // 8):  # sums stay spread over 8 columns: no shuffles here
    sum_H8 = sum_H8 + p_Hk[:, 8 * j : 8 * j + 8]
  plgpu.barrier_wait(refs.p_free.at[turn])
  refs.p_2Hk[turn] = p_Hk.astype(refs.p_2Hk.dtype)
  refs.per_head[turn] = alpha_H
  plgpu.commit_smem()
  plgpu.barrier_arrive(refs.p_ready.at[turn])
  return largest_H, sum_H8


def _publish_sum(walk: _Walk, query, largest_H, sum_H8):
  refs = walk.refs
  sum_H = sum_H8.sum(1)
  plgpu.barrier_wait(refs.sum_free)
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  refs.per_head[2] = 1.0 / sum_H
  refs.per_head[3] = largest_H * (1 / LOG2E) + jnp.log(sum_H)
  plgpu.commit_smem()
  plgpu.barrier_arrive(refs.sum_ready)
  plgpu.copy_smem_to_gmem(refs.per_head.at[3], refs.lse_SH.at[query])


def _along_rows(x_H, shape):
  return lax.broadcast_in_dim(x_H, shape, [0])


# The outputs.


def _output(walk: _Walk, side: int):
  refs, pieces = walk.refs, walk.pieces
  plgpu.set_max_registers(REGISTERS["output"], action="increase")
  for turn in range(2):
    plgpu.barrier_arrive(refs.p_free.at[turn])
  plgpu.barrier_arrive(refs.sum_free)
  columns = [WIDTH // 2 * side + WIDTH // 4 * i for i in range(2)]
  per_head = lambda i: plgpu.load(refs.per_head.at[i], layout=hopper_ptx.PER_ROW, optimized=False)

  def block(_, carry):
    slot, turn, sums = carry
    plgpu.barrier_wait(refs.p_ready.at[turn])
    sums = pieces.rescale(sums, per_head(turn))
    plgpu.barrier_wait(refs.go.at[turn])
    values = [refs.ring_Lkd.at[slot.number, :, pl.ds(c, WIDTH // 4)] for c in columns]
    sums = pieces.accumulate(sums, refs.p_2Hk.at[turn], values)
    plgpu.barrier_arrive(refs.p_free.at[turn])
    pieces.arrive(refs.ring_barriers, EMPTY + 2 * slot.number + side)
    return slot.next(), 1 - turn, sums

  def query(query, blocks, carry):
    slot, turn = carry
    zeros_Hn = jnp.zeros((HEADS, WIDTH // 4), jnp.float32)
    sums = [plgpu.layout_cast(zeros_Hn, hopper_ptx.MATRIX) for _ in columns]
    slot, turn, sums = lax.fori_loop(0, blocks, block, (slot.next(), turn, sums))
    plgpu.barrier_wait(refs.sum_ready)
    weight_H = per_head(2)
    plgpu.barrier_arrive(refs.sum_free)
    for x_Hn, column in zip(sums, columns, strict=True):
      out_Hn = (x_Hn * _along_rows(weight_H, x_Hn.shape)).astype(refs.out_SHd.dtype)
      pieces.store_rows(out_Hn, refs.out_SHd, query, column)
    return slot, turn

  walk.over_queries(query, (_first_slot(), jnp.int32(0)))


# The kernel.


def _body(*refs, with_entries: bool, pieces: ModuleType, programs: int, window: int):
  if not with_entries:
    refs = (*refs[:4], None, None, None, *refs[4:])
  walk = _Walk(_Refs(*refs), pieces, lax.axis_index("program"), programs, window)
  pieces.init_barriers(walk.refs.ring_barriers, ARRIVALS)
  warpgroup = lax.axis_index("warpgroup")
  roles = (_scores, functools.partial(_output, side=0), functools.partial(_output, side=1), _gather)
  for number, role in enumerate(roles):
    pl.when(warpgroup == number)(functools.partial(role, walk))


def _scratch(dtype, pieces: ModuleType):
  tiled = functools.partial(plgpu.SMEM, dtype=dtype, transforms=hopper_ptx.TILED)
  return [
    tiled((SLOTS, KEYS, WIDTH)),
    tiled((2, HEADS, KEYS)),
    tiled((CHUNKS - IN_REGISTERS, HEADS, WIDTH // CHUNKS)),
    plgpu.SMEM((4, HEADS), jnp.float32),
    pieces.barriers(len(ARRIVALS)),
    plgpu.Barrier(num_barriers=2),
    plgpu.Barrier(num_arrivals=2, num_barriers=2),
    plgpu.Barrier(num_barriers=2),
    plgpu.Barrier(),
    plgpu.Barrier(num_arrivals=2),
  ]


def _kernel(body, q_SHd, pieces: ModuleType, programs: int, interpret):
  return plgpu.kernel(
    body,
    out_type=(
      jax.ShapeDtypeStruct(q_SHd.shape, q_SHd.dtype),
      jax.ShapeDtypeStruct(q_SHd.shape[:2], jnp.float32),
    ),
    scratch_types=_scratch(q_SHd.dtype, pieces),
    grid=(programs,),
    grid_names=("program",),
    num_threads=4,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=True,
      unsafe_no_auto_barriers=True,
      reduction_scratch_bytes=0,
      lowering_semantics=plgpu.LoweringSemantics.Lane,
    ),
    interpret=interpret,
  )


def require(q_SHd, window: int, kv_Md) -> None:
  if q_SHd.shape[1:] != (HEADS, WIDTH):
    raise NotImplementedError(
      f"q has {q_SHd.shape[1]} heads of {q_SHd.shape[2]} channels; the Hopper kernel takes "
      f"{HEADS} of {WIDTH}."
    )
  if window % KEYS or window < KEYS:
    raise NotImplementedError(f"window is {window}; the Hopper kernel takes multiples of {KEYS}.")
  for name, dtype in (("q", q_SHd.dtype), ("kv", kv_Md.dtype)):
    if dtype != jnp.bfloat16:
      raise NotImplementedError(f"{name} is {dtype}; the Hopper kernel takes bfloat16.")


def forward(
  q_SHd: jax.Array,
  window_kv_Sd: jax.Array,
  entry_kv_Md: jax.Array | None,
  selection_SK: jax.Array | None,
  first_S: jax.Array,
  sink_H: jax.Array,
  *,
  window: int,
  programs: int | None = None,
  pieces: ModuleType = hopper_ptx,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Attention of every query to its window and to its chosen entries, with a sink.

  s_n = q . k_n / sqrt(d);  lse = log(sum exp(s) + exp(sink));  out = sum exp(s_n - lse) k_n, the
  probabilities rounded to bfloat16 before they weigh values. Rows of the batch stand one after
  another: slots and entries are numbered through. A query that sees nothing gets 0 and its sink.

  Args:
    q_SHd: bfloat16 queries, 64 heads of 512 channels.
    window_kv_Sd: bfloat16, the key of every slot; query s sees slots first_S[s] ... s of the last
      `window`.
    entry_kv_Md: bfloat16 entries; None for window only, and then selection_SK too.
    selection_SK: int32 entry numbers, -1 at the end; K a multiple of 64.
    first_S: int32 first slot that the window may reach; it may lie behind the query.
    sink_H: float32 logits, finite.
    window: slots, a multiple of 64.
    programs: multiprocessors to use; None takes all.
    pieces, interpret: hopper_plain and plgpu.InterpretGPUParams() run it on a CPU.

  Returns: out_SHd bfloat16; lse_SH float32, natural logarithm.

  Raises: NotImplementedError for other heads, widths, dtypes, windows or JAX versions.
  """
  require(q_SHd, window, window_kv_Sd if entry_kv_Md is None else entry_kv_Md)
  arrays = [q_SHd, window_kv_Sd, first_S, jnp.clip(sink_H, -LARGEST, LARGEST)]
  if entry_kv_Md is not None and selection_SK is not None and entry_kv_Md.size * selection_SK.size:
    # A block that starts with -1 is all -1.
    blocks_S = jnp.sum(selection_SK[:, ::KEYS] >= 0, axis=1, dtype=jnp.int32)
    arrays += [entry_kv_Md, selection_SK, blocks_S]
  if programs is None:
    programs = dispatch.device().cores or MULTIPROCESSORS
  programs = min(programs, q_SHd.shape[0])
  body = functools.partial(
    _body, with_entries=len(arrays) > 4, pieces=pieces, programs=programs, window=window
  )
  return _kernel(body, q_SHd, pieces, programs, interpret)(*arrays)
