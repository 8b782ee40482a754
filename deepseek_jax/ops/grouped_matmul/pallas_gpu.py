"""Grouped matmul on Hopper GPUs, forward and both gradients, in Pallas Mosaic GPU.

One kernel makes all three products. A tile of the output is a tile of rows of one group or, for the
gradient of the matrices, a tile of one group's matrix. One warpgroup streams blocks of both
operands into shared memory while two multiply, each half of the tile's columns. A group's rows
start at a multiple of `block_rows` and are a multiple of it, so nothing is masked.

Legend: P rows, G groups, K input width, N output width, T tiles of rows.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from deepseek_jax.ops import dispatch

_ROWS = 128  # height of an output tile; its accumulator takes half of a warpgroup's registers
_DEPTH = 64  # of the contraction at a time: 128 bytes, the widest swizzle of shared memory
_STAGES = 4  # blocks of operands in flight: 192 of the 227 KiB of a multiprocessor's shared memory
_OUT = 64  # edge of the pieces in which a tile leaves, two in flight for each warpgroup
_COPY_REGISTERS = 40  # of a thread that only issues copies; the others get the rest
_CORES = 132  # of an H200, where the device does not say
_INTERPRETED_CORES = 2  # more than one, so that the split of the tiles is tested
_accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
# The layout of 64 bfloat16 columns in shared memory that matrix units read and bulk copies write.
_TILED = (
  plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
  plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


@dataclasses.dataclass(frozen=True)
class _Product:
  """Which of the three products a kernel makes."""

  grid: tuple[int, int, int]  # row tiles, or groups and the row tiles of a matrix; column tiles
  columns: int  # of a tile, both halves
  depth: int  # of a step of the contraction
  granule: int  # rows of a tile come in multiples of this
  transposed: bool = False  # with the matrix's transpose
  by_group: bool = False  # of a group's rows with each other: [G, K, N]


class _Tile(NamedTuple):
  """Where one output tile comes from and goes to."""

  group: Any
  in_row: Any  # first row of the operands
  out_row: Any
  rows: Any  # that are stored, 0 for a tile that this load does not need
  steps: Any  # of the contraction
  column: Any  # tile of columns


def grouped_matmul(x_PK, w_GKN, group_rows_G, *, block_rows: int):
  dispatch.require_hopper()
  if (x_PK.dtype, w_GKN.dtype) != (jnp.bfloat16, jnp.bfloat16):
    raise NotImplementedError(f"the kernel takes bfloat16, got {x_PK.dtype} and {w_GKN.dtype}")
  if block_rows % _DEPTH:  # the matrices' gradient contracts rows, a whole step at a time
    raise NotImplementedError(f"the kernel needs blocks of 64, 128, ... rows, got {block_rows}")
  if any(width % 128 for width in w_GKN.shape[1:]):
    raise NotImplementedError(f"the kernel needs widths of 128, 256, ..., got {w_GKN.shape[1:]}")
  return _grouped_matmul(x_PK, w_GKN, group_rows_G.astype(jnp.int32), block_rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x_PK, w_GKN, group_rows_G, block_rows):
  return _rows_times_matrix(x_PK, w_GKN, group_rows_G, block_rows, transposed=False)


def _forward(x_PK, w_GKN, group_rows_G, block_rows):
  return _grouped_matmul(x_PK, w_GKN, group_rows_G, block_rows), (x_PK, w_GKN, group_rows_G)


def _backward(block_rows, saved, d_y_PN):
  x_PK, w_GKN, group_rows_G = saved
  d_x_PK = _rows_times_matrix(d_y_PN, w_GKN, group_rows_G, block_rows, transposed=True)
  return d_x_PK, _rows_times_rows(x_PK, d_y_PN, group_rows_G, block_rows), None


_grouped_matmul.defvjp(_forward, _backward)


# Jitted for dispatch.once's reason.
@functools.partial(jax.jit, static_argnames=("block_rows", "transposed"))
def _rows_times_matrix(x_PK, w_GKN, group_rows_G, block_rows: int, *, transposed: bool):
  """[P, N]: each row times its group's matrix, or times its transpose."""
  rows, depth = x_PK.shape
  width = w_GKN.shape[1 if transposed else 2]
  table = _row_tiles(group_rows_G, rows, depth // _DEPTH)
  columns = _columns(width)
  product = _Product(
    grid=(table[0].shape[0], 1, width // columns),
    columns=columns,
    depth=_DEPTH,
    granule=math.gcd(block_rows, _OUT),
    transposed=transposed,
  )
  return _launch(product, jax.ShapeDtypeStruct((rows, width), x_PK.dtype), x_PK, w_GKN, *table)


@functools.partial(jax.jit, static_argnames=("block_rows",))
def _rows_times_rows(x_PK, d_y_PN, group_rows_G, block_rows: int):
  """[G, K, N]: sum over a group's rows of their outer products."""
  groups, width_in, width_out = group_rows_G.shape[0], x_PK.shape[1], d_y_PN.shape[1]
  depth = math.gcd(block_rows, _DEPTH)  # a step may not reach into the next group
  columns = _columns(width_out)
  product = _Product(
    grid=(groups, width_in // _ROWS, width_out // columns),
    columns=columns,
    depth=depth,
    granule=_OUT,
    by_group=True,
  )
  start_G = jnp.cumsum(group_rows_G) - group_rows_G
  out = jax.ShapeDtypeStruct((groups, width_in, width_out), x_PK.dtype)
  return _launch(product, out, x_PK, d_y_PN, start_G, group_rows_G // depth)


def _columns(width: int) -> int:
  return 256 if width % 256 == 0 else 128


def _row_tiles(group_rows_G, rows: int, steps: int):
  """Group, first row, number of rows and contraction steps of every tile of rows, int32 [T] each.

  Rows past the last group make tiles without a step, whose result is zero. There are as many tiles
  as any load may need; those that this load does not need have no rows.
  """
  groups = group_rows_G.shape[0]
  size_G = jnp.append(group_rows_G, rows - jnp.sum(group_rows_G))
  begin_G = jnp.cumsum(size_G) - size_G
  tiles_G = -(-size_G // _ROWS)
  end_tile_G = jnp.cumsum(tiles_G)
  tile_T = jnp.arange(rows // _ROWS + groups + 1, dtype=jnp.int32)
  # A binary search would be a loop, and in a loop a GPU waits for the host.
  group_T = jnp.searchsorted(end_tile_G, tile_T, side="right", method="compare_all")
  group_T = jnp.minimum(group_T, groups)
  start_T = begin_G[group_T] + (tile_T - (end_tile_G - tiles_G)[group_T]) * _ROWS
  rows_T = jnp.clip(begin_G[group_T] + size_G[group_T] - start_T, 0, _ROWS)
  steps_T = jnp.where(group_T < groups, steps, 0)
  table = jnp.minimum(group_T, groups - 1), start_T, rows_T, steps_T
  return tuple(column_T.astype(jnp.int32) for column_T in table)


def _launch(product, out, *arrays):
  device = dispatch.device()
  interpreted = device.platform == "cpu"
  kernel = plgpu.kernel(
    functools.partial(_kernel, product),
    out_type=out,
    grid=(_INTERPRETED_CORES if interpreted else device.cores or _CORES,),
    grid_names=("core",),
    num_threads=3,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    interpret=plgpu.InterpretGPUParams() if interpreted else None,
  )
  return kernel(*arrays)


def _kernel(product, a_gmem, b_gmem, *refs):
  """One core's share of the tiles; `refs` are the tables of the tiles, and the output."""
  *table, out_gmem = refs
  matrix = lambda group: b_gmem if product.by_group else b_gmem.at[group]
  nothing = lambda *_: None
  any_tile = _Tile(0, 0, 0, 0, steps=_STAGES, column=0)  # fewer steps would get fewer buffers
  buffers = _pipeline(product, any_tile, nothing, nothing).get_allocations(a_gmem, matrix(0))
  pieces = plgpu.SMEM((2, 2, _OUT, _OUT), out_gmem.dtype, transforms=_TILED)

  @functools.partial(pl.run_scoped, buffers=buffers, pieces=pieces, collective_axes="warpgroup")
  def _scope(buffers, pieces):
    half = lax.axis_index("warpgroup")

    @plgpu.nd_loop(product.grid, collective_axes="core")
    def _loop(loop):
      tile = _tile(product, table, *loop.index)
      out_matrix = out_gmem.at[tile.group] if product.by_group else out_gmem

      def compute(multiply_all):
        def scope(acc):
          multiply_all(acc)
          _store(product, tile, half, acc[...].astype(out_gmem.dtype), pieces, out_matrix)

        pl.run_scoped(scope, _accumulator((_ROWS, product.columns // 2), jnp.float32))

      @pl.when(tile.rows > 0)
      def _():
        multiply = functools.partial(_multiply, product, half)
        pipeline = _pipeline(product, tile, multiply, compute)
        pipeline(a_gmem, matrix(tile.group), allocations=buffers)

  plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tile(product, table, outer, row_tile, column) -> _Tile:
  if product.by_group:
    start_gmem, steps_gmem = table
    rows = jnp.int32(_ROWS)
    return _Tile(outer, start_gmem[outer], row_tile * _ROWS, rows, steps_gmem[outer], column)
  group, start, rows, steps = (column_gmem[outer] for column_gmem in table)
  return _Tile(group, start, start, rows, steps, column)


def _pipeline(product, tile, multiply, compute):
  """Streams blocks of both operands of a tile through shared memory."""
  rows, columns, depth = _ROWS, product.columns, product.depth
  if product.by_group:
    first = lambda k: pl.multiple_of(tile.in_row + k * depth, product.depth)
    a = (pl.Element(depth), rows), lambda k: (first(k), tile.out_row // _ROWS)
    b = (pl.Element(depth), columns), lambda k: (first(k), tile.column)
  else:
    a = (pl.Element(rows), depth), lambda k: (pl.multiple_of(tile.in_row, product.granule), k)
    b = (depth, columns), lambda k: (k, tile.column)
  if product.transposed:
    b = (columns, depth), lambda k: (tile.column, k)
  spec = lambda shape, index: plgpu.BlockSpec(shape, index, transforms=_TILED)
  return plgpu.emit_pipeline_warp_specialized(
    multiply,
    grid=(tile.steps,),
    memory_registers=_COPY_REGISTERS,
    in_specs=(spec(*a), spec(*b)),
    wg_axis="warpgroup",
    num_compute_wgs=2,
    max_concurrent_steps=_STAGES,
    compute_context=compute,
  )


def _multiply(product, half, _, a_smem, b_smem, acc):
  columns = pl.ds(half * (product.columns // 2), product.columns // 2)
  a = a_smem.transpose((1, 0)) if product.by_group else a_smem
  b = b_smem.at[columns].transpose((1, 0)) if product.transposed else b_smem.at[:, columns]
  plgpu.wgmma(acc, a, b)
  plgpu.wgmma_wait(0)
  return acc


def _store(product, tile, half, out, pieces, out_gmem):
  """A half tile leaves in pieces; of a group's last tile only the group's rows."""
  height, width = out.shape
  column = tile.column * product.columns + half * width
  places = [(row, piece) for row in range(0, height, _OUT) for piece in range(0, width, _OUT)]
  for turn, (row, piece) in enumerate(places):
    slot = pieces.at[half, turn % 2]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    slot[...] = out[row : row + _OUT, piece : piece + _OUT]
    plgpu.commit_smem()
    for part in range(0, _OUT, product.granule):

      @pl.when(row + part < tile.rows)
      def _(row=row, part=part, piece=piece, slot=slot):
        to = pl.multiple_of(tile.out_row + row + part, product.granule)
        plgpu.copy_smem_to_gmem(
          slot.at[pl.ds(part, product.granule)],
          out_gmem.at[pl.ds(to, product.granule), pl.ds(column + piece, _OUT)],
          commit_group=False,
        )

    plgpu.commit_smem_to_gmem_group()
