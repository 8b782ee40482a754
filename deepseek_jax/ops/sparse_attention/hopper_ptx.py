"""PTX that Pallas Mosaic GPU cannot express: row gathers, their barriers, key masks, wide stores.

With `hopper_backward_ptx`, which adds what one pass needs, the only module that touches unstable
internals of JAX (`inline_mgpu`, Mosaic GPU dialect, MLIR). It runs under Lane lowering semantics: a
warpgroup of 128 threads calls every function here, which sees the registers of one thread.
`hopper_plain` has the same functions in plain Pallas, for interpret mode.

Legend: M rows of a table, d row width, R = 64 rows of a ring slot, L slots, S queries, H heads,
K chosen entries, k keys of a block, n columns, T = 512 row numbers as 128 threads hold them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

# Run on an H200. The kernels compile with 0.12.0.1 too, but its linker (nvJitLink) ignores
# `setmaxnreg`: all threads get the same registers, they spill, and products wait for each other.
VERSIONS = ("0.11.2",)

ROWS, WIDTH = 64, 512  # of a ring slot; a row is 1 KB of bfloat16
ROW_BYTES, SLOT_BYTES = 2 * WIDTH, 2 * ROWS * WIDTH
TILED: tuple[Any, ...] = (  # what WGMMA reads; both classes say that they are abstract
  plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
  plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
MATRIX = plgpu.Layout.WGMMA  # 64 x n accumulator
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value per row of an accumulator
SCALAR = plgpu.Layout.WG_SPLAT(())
# Thread (warp w, lane) copies rows 16 w + lane // 8 + {0, 4, 8, 12}: four row numbers per thread.
ROW_NUMBERS = plgpu.Layout.WG_STRIDED((4 * 128,), vec_size=4)
_REF, _TILED_REF = plgpu.RefType(), plgpu.RefType(TILED)
_FENCE = "fence.proxy.async.shared::cta;"
_TICKS = 10_000_000  # a wait tries this long before it tries again


def require_supported() -> None:
  """Raises NotImplementedError unless this JAX is one that the kernels were run on."""
  if jax.__version__ not in VERSIONS:
    raise NotImplementedError(
      f"jax is {jax.__version__}; the Hopper kernels use unstable parts of it and were run on "
      f"{', '.join(VERSIONS)}."
    )


def inline(*, arg_types=(), return_type=None) -> Callable[..., Callable[..., Any]]:
  """plgpu.inline_mgpu: the decorated function takes a context first, which callers do not pass."""
  return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


# Small pieces of IR.


def i32_type():
  return ir.IntegerType.get_signless(32)


def i64_type():
  return ir.IntegerType.get_signless(64)


def const32(value: int):
  return utils.c(value, i32_type())


def const64(value: int):
  return utils.c(value, i64_type())


def widen(x):
  """int32 that is not negative -> int64."""
  return arith.extui(i64_type(), x)


def add(first, *others):
  for other in others:
    first = arith.addi(first, other)
  return first


def mul(x, y):
  return arith.muli(x, y)


def at_least(x, y):
  return arith.cmpi(arith.CmpIPredicate.sge, x, y)


def differs(x, y):
  return arith.cmpi(arith.CmpIPredicate.ne, x, y)


def ptx(text: str, *args, **options):
  return utils.inline_ptx(text, *args, has_side_effects=True, **options)


def register(x):
  """The register that holds a scalar argument."""
  return x.registers.flat[0]


def global_address(ref):
  return llvm.ptrtoint(i64_type(), utils.memref_ptr(ref))


def shared_address(ref):
  return llvm.ptrtoint(i32_type(), utils.memref_ptr(ref))


def thread():
  """Number of this thread in its warpgroup."""
  return arith.andi(utils.thread_idx(), const32(127))


def warp_and_lane():
  return arith.shrui(thread(), const32(5)), arith.andi(thread(), const32(31))


# Barriers. cp.async has to signal them and Pallas barriers cannot be handed to inline_mgpu, so they
# live in a plain array: two int32 words each.


def barriers(number: int):
  """Scratch for that many barriers."""
  return plgpu.SMEM((2 * number,), jnp.int32)


def _barrier(ref, index):
  return utils.getelementptr(utils.memref_ptr(ref), [index], i64_type())


def init_barriers(barriers_ref, arrivals: tuple[int, ...]) -> None:
  """Every thread of the block calls it, before anything else; arrivals[i] completes barrier i."""

  @inline(arg_types=(_REF,))
  def init(ctx, ref):
    with utils.single_thread(scope=utils.ThreadSubset.BLOCK):
      for index, count in enumerate(arrivals):
        nvvm.mbarrier_init(_barrier(ref, const32(index)), const32(count))
    ptx("fence.mbarrier_init.release.cluster;")
    ptx("bar.sync 0;", convergent=True)

  init(barriers_ref)


def wait(barriers_ref, index, parity) -> None:
  """Waits for a completion; they are numbered from 0 and `parity` is that of the number.

  A waiter must not fall two completions behind: it would then hang.
  """

  @inline(arg_types=(_REF, SCALAR, SCALAR))
  def wait_parity(ctx, ref, index, parity):
    nvvm.mbarrier_try_wait_parity(_barrier(ref, register(index)), register(parity), const32(_TICKS))

  wait_parity(barriers_ref, jnp.int32(index), jnp.int32(parity))


def arrive(barriers_ref, index) -> None:
  """One arrival per warp, so four of the warpgroup."""

  @inline(arg_types=(_REF, SCALAR))
  def arrive_lane_0(ctx, ref, index):
    lane_0 = arith.cmpi(arith.CmpIPredicate.eq, warp_and_lane()[1], const32(0))
    ptx(
      "mbarrier.arrive.shared::cta.b64 _, [$0];", _barrier(ref, register(index)), predicate=lane_0
    )

  arrive_lane_0(barriers_ref, jnp.int32(index))


def fence_async_proxy() -> None:
  """WGMMA reads shared memory through the async proxy, cp.async wrote through the generic one."""

  @inline()
  def fence(ctx):
    ptx(_FENCE)

  fence()


# Gather. A slot is row-major in (8-row, 64-column) tiles of 1 KB; inside a tile row r is a 128-byte
# line and its 16-byte chunk c sits at position c ^ (r % 8), the swizzle that WGMMA expects. Eight
# lanes fill one line: shared writes have no conflicts and global reads are whole lines.


def row_offsets():
  """0 .. 63 as row numbers: thread t holds the four rows that it copies."""

  @inline(return_type=plgpu.ShapeDtypeStruct((512,), jnp.int32, layout=ROW_NUMBERS))
  def offsets(ctx):
    warp, lane = warp_and_lane()
    first = add(mul(warp, const32(16)), arith.shrui(lane, const32(3)))
    return _row_numbers([add(first, const32(4 * g)) for g in range(4)])

  return offsets()


def _row_numbers(words):
  value = llvm.mlir_undef(ir.VectorType.get((4,), i32_type()))
  for g, word in enumerate(words):
    value = llvm.insertelement(value, word, const32(g))
  return mgpu.FragmentedArray(
    _registers=np.array([value], dtype=object), _layout=ROW_NUMBERS.to_mgpu(), _is_signed=True
  )


def _row_words(rows_T):
  return [llvm.extractelement(register(rows_T), const32(g)) for g in range(4)]


def chosen_rows(selection_SK_ref, query, block, active, otherwise_T):
  """Row numbers selection[query, 64 block ...] if `active`, a scalar, is not 0, else `otherwise`.

  The answer is not looked at here, so that the load overlaps with whatever comes before its use.
  """

  @inline(
    arg_types=(_REF, SCALAR, SCALAR, SCALAR, ROW_NUMBERS),
    return_type=plgpu.ShapeDtypeStruct((512,), jnp.int32, layout=ROW_NUMBERS),
  )
  def load(ctx, ref, query, block, active, otherwise):
    warp, lane = warp_and_lane()
    row = add(mul(warp, const32(16)), arith.shrui(lane, const32(3)))
    address = add(
      _block_address(ref, register(query), register(block)), widen(mul(row, const32(4)))
    )
    return _row_numbers(
      [
        _load_if(register(active), address, 16 * g, word)
        for g, word in enumerate(_row_words(otherwise))
      ]
    )

  return load(selection_SK_ref, query, block, active, otherwise_T)


def _block_address(selection_ref, query, block):
  pitch = 4 * ir.MemRefType(selection_ref.type).shape[1]
  in_row = arith.extsi(i64_type(), mul(block, const32(4 * ROWS)))  # may be negative when not loaded
  return add(global_address(selection_ref), mul(widen(query), const64(pitch)), in_row)


def _load_if(active, address, offset: int, otherwise):
  text = (
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, $3;"
    f" @p ld.global.nc.b32 $0, [$1+{offset}]; }}"
  )
  return ptx(text, address, active, otherwise, result_types=i32_type())


def copy_half(tables_refs, table, rows_T, ring_ref, slot, half, barriers_ref, barrier) -> None:
  """Starts copying half of 64 rows, 256 columns, into half a slot; a negative row becomes zeros.

  Each of its two quarters of 128 columns arrives 128 times (once a thread, when the thread's copies
  have landed) at barriers `barrier + quarter`, quarter = 2 half, 2 half + 1. No thread waits.

  Args:
    tables_refs: (queries, window keys, entries): bfloat16 [..., 512] in global memory; entries may
      be absent.
    table: scalar, which of them.
    rows_T: row numbers; a table is addressed in 64 bits.
    ring_ref: [L, 64, 512] bfloat16, tiled and swizzled.
  """

  @inline(
    arg_types=([_REF] * len(tables_refs), SCALAR, ROW_NUMBERS, _TILED_REF, SCALAR, _REF, SCALAR)
  )
  def copy(ctx, tables, table, rows, ring, slot, barriers_, barrier):
    warp, lane = warp_and_lane()
    line, chunk = arith.shrui(lane, const32(3)), arith.andi(lane, const32(7))
    base, policy = _table_and_policy(tables, register(table))
    base = add(base, widen(mul(chunk, const32(16))))
    sources = []
    for row in _row_words(rows):
      inside = at_least(row, const32(0))
      start = add(base, mul(widen(arith.maxsi(row, const32(0))), const64(ROW_BYTES)))
      sources.append((start, arith.select(inside, const32(16), const32(0))))  # size 0 writes zeros
    start = add(
      shared_address(ring),
      mul(register(slot), const32(SLOT_BYTES)),
      mul(warp, const32(2 * 8 * ROW_BYTES)),
      mul(line, const32(128)),
    )
    # Rows of a thread are `line` and `line + 4` of a tile: two addresses, the rest are offsets.
    places = [
      add(
        start,
        const32(512 * odd),
        arith.shli(arith.xori(chunk, add(line, const32(4 * odd))), const32(4)),
      )
      for odd in range(2)
    ]
    for quarter in (2 * half, 2 * half + 1):
      for g, (source, size) in enumerate(sources):
        for tile in (2 * quarter, 2 * quarter + 1):
          ptx(
            "cp.async.cg.shared.global.L2::cache_hint"
            f" [$0+{1024 * tile + 8 * ROW_BYTES * (g // 2)}], [$1+{128 * tile}], 16, $2, $3;",
            places[g % 2], source, size, policy,
          )  # fmt: skip
      full = _barrier(barriers_, add(register(barrier), const32(quarter)))
      ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", full)

  copy(list(tables_refs), jnp.int32(table), rows_T, ring_ref, slot, barriers_ref, barrier)


# Queries are read once, window keys soon again by neighbours, entries again and again.
_POLICIES = ("evict_first", "evict_normal", "evict_last")


def _table_and_policy(tables, table):
  base = policy = None
  for number, (ref, name) in enumerate(zip(tables, _POLICIES, strict=False)):
    address = global_address(ref)
    hint = utils.inline_ptx(
      f"createpolicy.fractional.L2::{name}.b64 $0, 1.0;",
      result_types=i64_type(),
      has_side_effects=False,
    )
    if base is None:
      base, policy = address, hint
      continue
    chosen = at_least(table, const32(number))
    base, policy = arith.select(chosen, address, base), arith.select(chosen, hint, policy)
  return base, policy


# Scores.


class KeyMask(NamedTuple):
  """Which keys of a block exist.

  Key k does if selection[query, 64 block + k] >= 0 where `chosen`, a scalar, is not 0, else if
  k >= skip. Without a selection it is always the latter.
  """

  selection_SK_ref: Any | None
  query: Any
  block: Any
  chosen: Any
  skip: Any


def score_block(chunks, rest_ref, keys_kd_ref, full, mask: KeyMask):
  """Q K^T as float32 [64, k] in registers, -inf where a key does not exist.

  Pallas' wgmma passes operands that live in registers through an optimization barrier at every use;
  newer assemblers (ptxas 13.5) then keep two copies and spill one. Here they are used as they are.

  Args:
    chunks: first 64-column chunks of the queries, in registers.
    rest_ref: the others, [n, 64, 64], in tiled and swizzled shared memory.
    keys_kd_ref: a ring slot.
    full: (barriers_ref, barrier, parity); quarter i is in the slot once barrier + i completes, and
      the fence that follows serves every warpgroup that is told of the scores.
    mask: read while the products run.
  """
  selection = [ref for ref in mask[:1] if ref is not None]

  @inline(
    arg_types=(
      [MATRIX] * len(chunks), _TILED_REF, _TILED_REF, (_REF, SCALAR, SCALAR),
      [_REF] * len(selection), (SCALAR,) * 4,
    ),
    return_type=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.float32, layout=MATRIX),
  )  # fmt: skip
  def scores(ctx, chunks, rest, keys, full, selection, mask):
    barriers_, first, parity = full
    sums = mgpu.WGMMAAccumulator.zero(ROWS, ROWS)
    for quarter in range(4):
      barrier = _barrier(barriers_, add(register(first), const32(quarter)))
      nvvm.mbarrier_try_wait_parity(barrier, register(parity), const32(_TICKS))
    # One fence for all: starting on the first quarter early gained less than four fences cost.
    ptx(_FENCE)
    for number in range(WIDTH // 64):
      keys_T = mgpu.memref_transpose(_tile_column(keys, number), (1, 0, 3, 2))
      if number < len(chunks):
        sums = _multiply_registers(sums, chunks[number], keys_T)
      else:
        sums = mgpu.wgmma(sums, _element(rest, number - len(chunks)), keys_T, swizzle=128)
      nvvm.wgmma_commit_group_sync_aligned()
    words = valid_words(selection, *(register(x) for x in mask))
    nvvm.wgmma_wait_group_sync_aligned(0)
    return mask_scores(fragmented_array.optimization_barrier(sums.value), words)

  barriers_ref, barrier, parity = full
  return scores(
    list(chunks), rest_ref, keys_kd_ref, (barriers_ref, jnp.int32(barrier), parity), selection,
    tuple(jnp.int32(x) for x in mask[1:]),
  )  # fmt: skip


def _tile_column(ref, number: int):
  """Columns 64 number ... of a tiled [rows, columns] reference."""
  return mgpu.memref_slice(ref, (slice(None), slice(number, number + 1)))


def _element(ref, number: int):
  return mgpu.memref_slice(ref, number)


def _multiply_registers(sums, chunk, keys_T):
  """sums + chunk @ keys; mgpu.wgmma without its barrier around the chunk."""
  (start, (_, (stride, *_))), _, fastest = _descriptor(keys_T)
  value = sums._value
  registers = value.registers.copy()
  bfloat16 = ir.BF16Type.get()
  registers[0:1] = wgmma_m64(
    registers[0:1], chunk, start, a_transpose=None, b_transpose=fastest != mma_utils.Dim.K,
    a_k_stride=None, b_k_stride=stride, n=ROWS, swizzle=128, a_element_type=bfloat16,
    b_element_type=bfloat16,
  )  # fmt: skip
  value = mgpu.FragmentedArray(
    _registers=registers, _layout=value.layout, _is_signed=value.is_signed
  )
  return mgpu.WGMMAAccumulator(_value=value, _original_layout=sums._original_layout, _sync=False)


def _descriptor(keys_T) -> Any:
  return mma_utils.create_descriptor(
    keys_T, swizzle=128, large_tile=(64, 64), group_size=(64, ROWS), logical_k_major=True
  )


def valid_words(selection, query, block, chosen, skip):
  """Bit k of word h, the same in every thread, says that key 32 h + k exists."""
  lane = warp_and_lane()[1]
  value = arith.subi(lane, skip)
  values = [value, add(value, const32(32))]
  if selection:
    address = add(_block_address(selection[0], query, block), widen(mul(lane, const32(4))))
    values = [_load_if(chosen, address, 128 * h, v) for h, v in enumerate(values)]
  text = "{ .reg .pred p; setp.ge.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
  return [ptx(text, v, result_types=i32_type(), convergent=True) for v in values]


def mask_scores(x, words):
  """-inf for keys that do not exist; nothing is done when all 64 do."""
  values = list(x.registers.flat)  # 8 columns and 8 rows each: two neighbouring columns of a row
  all_exist = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(*words), const32(-1))
  choice: Any = scf.IfOp(all_exist, [v.type for v in values], has_else=True)
  with ir.InsertionPoint(choice.then_block):
    scf.yield_(values)
  with ir.InsertionPoint(choice.else_block):
    scf.yield_(_masked(values, words))
  registers = np.array(list(choice.results), dtype=object).reshape(x.registers.shape)
  return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)


def _masked(values, words):
  column = mul(arith.andi(utils.thread_idx(), const32(3)), const32(2))
  words = [arith.shrui(word, column) for word in words]
  lowest = utils.c(float("-inf"), ir.F32Type.get())
  result = []
  for number, value in enumerate(values):
    for element in range(2):
      bit = const32(1 << (8 * (number // 2 % 4) + element))
      exists = differs(arith.andi(words[number // 8], bit), const32(0))
      old = llvm.extractelement(value, const32(element))
      value = llvm.insertelement(value, arith.select(exists, old, lowest), const32(element))
    result.append(value)
  return result


# Accumulators.


def rescale(accumulators, factor_H):
  """Multiplies the rows of [H, n] accumulators; a warp whose factors are all 1 does nothing."""

  @inline(
    arg_types=([MATRIX] * len(accumulators), PER_ROW),
    return_type=[plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=MATRIX) for a in accumulators],
  )
  def scaled(ctx, values, factor):
    old = [register for value in values for register in value.registers.flat]
    choice: Any = scf.IfOp(_some_differ_from_1(factor), [x.type for x in old], has_else=True)
    with ir.InsertionPoint(choice.then_block):
      products = [v * factor.broadcast_in_dim(v.shape, (0,), v.layout) for v in values]
      scf.yield_([register for product in products for register in product.registers.flat])
    with ir.InsertionPoint(choice.else_block):
      scf.yield_(old)
    new = np.array(list(choice.results), dtype=object)
    parts = np.split(new, np.cumsum([value.registers.size for value in values])[:-1])
    values = [
      mgpu.FragmentedArray(
        _registers=part.reshape(v.registers.shape), _layout=v.layout, _is_signed=v.is_signed
      )
      for part, v in zip(parts, values, strict=True)
    ]
    return list(fragmented_array.optimization_barrier(*values))

  return scaled(list(accumulators), factor_H)


def _some_differ_from_1(factor):
  """Whether any of the factors that the threads of this warp hold is not 1; the same in all."""
  one = utils.c(1.0, ir.F32Type.get())
  found = None
  for value in factor.registers.flat:
    if isinstance(value.type, ir.VectorType):
      value = llvm.extractelement(value, const32(0))
    differs_ = arith.cmpf(arith.CmpFPredicate.UNE, value, one)
    found = differs_ if found is None else arith.ori(found, differs_)
  text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
  flag = arith.extui(i32_type(), found)
  return differs(ptx(text, flag, result_types=i32_type(), convergent=True), const32(0))


def accumulate(accumulators, p_Hk_ref, values_refs):
  """accumulators[i] [H, n] += p [H, k] @ values[i] [k, n]: one fence, one group, one wait.

  With 512 threads ptxas refuses any instruction that needs more than 128 registers, so 256 columns
  are two accumulators; issued apart, ptxas would put a wait between them (C7602, C7517).
  """

  @inline(
    arg_types=([MATRIX] * len(accumulators), _TILED_REF, [_TILED_REF] * len(accumulators)),
    return_type=[plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=MATRIX) for a in accumulators],
  )
  def multiply(ctx, sums, p, values):
    sums = [mgpu.WGMMAAccumulator.from_registers(x) for x in sums]
    sums = [mgpu.wgmma(x, p, v, swizzle=128) for x, v in zip(sums, values, strict=True)]
    nvvm.wgmma_commit_group_sync_aligned()
    nvvm.wgmma_wait_group_sync_aligned(0)
    return list(fragmented_array.optimization_barrier(*[x.value for x in sums]))

  return multiply(list(accumulators), p_Hk_ref, list(values_refs))


def store_rows(x_Hn, out_ref, query, column: int) -> None:
  """out[query, :, column : column + n] = x, bfloat16, with 16-byte streaming stores.

  Four lanes that hold a row trade registers so that each has 8 neighbouring columns of 32.
  """

  @inline(arg_types=(MATRIX, _REF, SCALAR))
  def store(ctx, x, out, query):
    words = [
      llvm.extractelement(vector.bitcast(ir.VectorType.get((1,), i32_type()), v), const32(0))
      for v in x.registers.flat
    ]
    heads, width = ir.MemRefType(out.type).shape[1:]
    pitch = 2 * width
    warp, lane = warp_and_lane()
    part = arith.andi(lane, const32(3))
    row = add(mul(warp, const32(16)), arith.shrui(lane, const32(2)))
    in_query = add(mul(row, const32(pitch)), mul(part, const32(16)), const32(2 * column))
    start = add(
      global_address(out), mul(widen(register(query)), const64(heads * pitch)), widen(in_query)
    )
    for group in range(x.shape[1] // 32):
      for half in range(2):  # rows `row` and `row + 8`
        quad = _transpose_quad([words[(4 * group + j) * 2 + half] for j in range(4)], part)
        ptx(
          f"st.global.cs.v4.b32 [$0+{8 * half * pitch + 64 * group}], {{$1,$2,$3,$4}};",
          start, *quad,
        )  # fmt: skip

  store(x_Hn, out_ref, query)


def _transpose_quad(words, part):
  """4 x 4 transpose of words over the four lanes of a quad; `part` is the lane's number in it."""
  for step, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
    odd = differs(arith.andi(part, const32(step)), const32(0))
    for i, j in pairs:
      got = utils.shfl_bfly(arith.select(odd, words[i], words[j]), step)
      words[i], words[j] = arith.select(odd, got, words[i]), arith.select(odd, words[j], got)
  return words
