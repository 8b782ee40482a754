"""Calls of Pallas-Triton kernels: whole arrays in global memory; interpreted without a GPU."""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def triton_call(
  kernel: Callable,
  arrays: Sequence[jax.Array],
  outputs: Sequence[jax.ShapeDtypeStruct],
  grid: tuple[int, ...],
  *,
  in_place: Mapping[int, int] | None = None,
  num_warps: int,
  num_stages: int = 1,
) -> list[jax.Array]:
  """Runs `kernel(*array_refs, *output_refs)` once for each point of `grid`.

  On a GPU, or when an ahead-of-time target is one, Triton compiles it; elsewhere it is interpreted.

  Args:
    kernel: a function of Refs of whole arrays; the programs of a grid run in any order.
    arrays: operands.
    outputs: shapes and dtypes of the results; elements that no program writes are undefined.
    grid: at most three numbers of programs; the second and third at most 65535.
    in_place: operand number -> number of the output that starts as that operand.
    num_warps: warps of 32 threads that share a program.
    num_stages: how deep Triton may prefetch the loads of a loop.
  """
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=list(outputs),
    input_output_aliases=dict(in_place or {}),
    compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    interpret=not plt.is_gpu_device(),
  )(*arrays)
