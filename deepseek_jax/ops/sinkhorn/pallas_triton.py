"""Sinkhorn normalization for GPUs: all iterations in one kernel, and one for the gradient.

A loop of XLA is some hundred small kernels for every site, a third of all that a step of
configs/ablation.py ran (docs/log.md). Here a thread has a token's matrix in registers. The
gradient's kernel leaves the iterates in memory on its way forward and reads them on its way back.

Legend: X leading axes, S tokens, T tokens of a program, c streams; a matrix is indexed [old stream,
new stream], and inside kernels a tuple of rows, each a tuple of arrays [T].
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deepseek_jax.ops import dispatch
from deepseek_jax.ops.triton_call import triton_call

_TOKENS, _WARPS = 64, 2  # of a program: a thread for each token. Not measured against others.
_MOST_STREAMS = 4  # 8 x 8 entries and their gradient would not fit a thread's 255 registers

Matrix = tuple[tuple[jax.Array, ...], ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sinkhorn(logits_Xcc: jax.Array, iterations: int, eps: float) -> jax.Array:
  """As the public op."""
  streams = logits_Xcc.shape[-1]
  if streams > _MOST_STREAMS:
    raise NotImplementedError(f"{streams} streams, the kernel takes at most {_MOST_STREAMS}.")
  if logits_Xcc.dtype != jnp.float32:
    raise NotImplementedError(f"logits are {logits_Xcc.dtype}, the kernel takes float32.")
  if not logits_Xcc.size:
    return logits_Xcc
  return _call(_forward_kernel, iterations, eps, logits_Xcc)


def _backward(iterations, eps, logits_Xcc, d_Xcc):
  if not logits_Xcc.size:
    return (d_Xcc,)
  return (_call(_backward_kernel, iterations, eps, logits_Xcc, d_Xcc),)


sinkhorn.defvjp(
  lambda logits, iterations, eps: (sinkhorn(logits, iterations, eps), logits), _backward
)


def _call(kernel, iterations: int, eps: float, *arrays_Xcc: jax.Array) -> jax.Array:
  return dispatch.once(_run, "kernel", "iterations", "eps")(
    *arrays_Xcc, kernel=kernel, iterations=iterations, eps=eps
  )


def _run(*arrays_Xcc: jax.Array, kernel: Any, iterations: int, eps: float) -> jax.Array:
  shape = arrays_Xcc[0].shape
  arrays_Scc = [x.reshape(-1, *shape[-2:]) for x in arrays_Xcc]
  like = lambda *leading: jax.ShapeDtypeStruct((*leading, *arrays_Scc[0].shape), jnp.float32)
  iterates = [like(max(1, iterations - 1))] if kernel is _backward_kernel else []
  results = triton_call(
    functools.partial(kernel, iterations=iterations, eps=eps),
    arrays_Scc,
    [like(), *iterates],
    (pl.cdiv(arrays_Scc[0].shape[0], _TOKENS),),
    num_warps=_WARPS,
  )
  return results[0].reshape(shape)


def _forward_kernel(logits_ref, out_ref, *, iterations: int, eps: float):
  tokens_T = _tokens(logits_ref)
  matrix = _first(_read(logits_ref, (tokens_T,)), eps)
  again = lambda _, m: _again(m, eps)
  _write(out_ref, (tokens_T,), jax.lax.fori_loop(0, iterations - 1, again, matrix))


def _backward_kernel(logits_ref, d_ref, out_ref, iterates_ref, *, iterations: int, eps: float):
  tokens_T = _tokens(logits_ref)
  first, first_vjp = jax.vjp(lambda x: _first(x, eps), _read(logits_ref, (tokens_T,)))

  def keep(n, matrix):
    _write(iterates_ref, (n, tokens_T), matrix)
    return _again(matrix, eps)

  def back(n, d_matrix):
    matrix = _read(iterates_ref, (iterations - 2 - n, tokens_T))
    return jax.vjp(lambda m: _again(m, eps), matrix)[1](d_matrix)[0]

  jax.lax.fori_loop(0, iterations - 1, keep, first)
  d_first = jax.lax.fori_loop(0, iterations - 1, back, _read(d_ref, (tokens_T,)))
  _write(out_ref, (tokens_T,), first_vjp(d_first)[0])


def _tokens(ref) -> jax.Array:
  """The tokens of this program; past the end the last one again, to the same result."""
  first = pl.program_id(0) * _TOKENS
  return jnp.minimum(first + jnp.arange(_TOKENS), ref.shape[0] - 1)


def _read(ref, where: tuple[Any, ...]) -> Matrix:
  streams = range(ref.shape[-1])
  return tuple(tuple(ref[*where, i, j] for j in streams) for i in streams)


def _write(ref, where: tuple[Any, ...], matrix: Matrix) -> None:
  for i, row in enumerate(matrix):
    for j, entry_T in enumerate(row):
      ref[*where, i, j] = entry_T


def _first(logits: Matrix, eps: float) -> Matrix:
  return _columns(tuple(_softmax(row, eps) for row in logits), eps)


def _softmax(row: tuple[jax.Array, ...], eps: float) -> tuple[jax.Array, ...]:
  # A softmax does not change with what is subtracted, so neither does its gradient.
  largest_T = jax.lax.stop_gradient(functools.reduce(jnp.maximum, row))
  powers = tuple(jnp.exp(x - largest_T) for x in row)
  return tuple(p / sum(powers) + eps for p in powers)


def _again(matrix: Matrix, eps: float) -> Matrix:
  return _columns(tuple(_divided(row, eps) for row in matrix), eps)


def _columns(matrix: Matrix, eps: float) -> Matrix:
  return tuple(zip(*(_divided(column, eps) for column in zip(*matrix, strict=True)), strict=True))


def _divided(entries: tuple[jax.Array, ...], eps: float) -> tuple[jax.Array, ...]:
  """By their sum; one division and products, for a division is many instructions."""
  inverse_T = 1.0 / (sum(entries) + eps)
  return tuple(x * inverse_T for x in entries)
