"""Sinkhorn normalization in plain JAX, with a backward pass that stores no iterates.

Legend: X leading axes, c streams; the matrix is indexed [old stream, new stream].
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sinkhorn(logits_Xcc: jax.Array, iterations: int, eps: float) -> jax.Array:
  """As the public op."""
  return _finish(_run(_start(logits_Xcc), iterations, eps))


def _start(logits_Xcc):
  """[c, c, X]: tokens last, so that the arithmetic is wide and the matrix axes are cheap to sum.

  Leading axes stay as they are: as one they could not lie on a mesh that cuts several.
  """
  return jnp.moveaxis(logits_Xcc, (-2, -1), (0, 1))


def _finish(matrix_ccX):
  return jnp.moveaxis(matrix_ccX, (0, 1), (-2, -1))


def _first(logits_ccX, eps):
  return _columns(jax.nn.softmax(logits_ccX, axis=1) + eps, eps)


def _columns(matrix_ccX, eps):
  return matrix_ccX / (jnp.sum(matrix_ccX, axis=0, keepdims=True) + eps)


def _again(matrix_ccX, eps):
  rows = matrix_ccX / (jnp.sum(matrix_ccX, axis=1, keepdims=True) + eps)
  return _columns(rows, eps)


def _run(logits_ccX, iterations, eps):
  first = _first(logits_ccX, eps)
  return jax.lax.fori_loop(0, iterations - 1, lambda _, m: _again(m, eps), first)


def _forward(logits_Xcc, iterations, eps):
  return sinkhorn(logits_Xcc, iterations, eps), logits_Xcc


def _backward(iterations, eps, logits_Xcc, d_out):
  first, first_vjp = jax.vjp(functools.partial(_first, eps=eps), _start(logits_Xcc))
  keep = lambda m, _: (_again(m, eps), m)
  _, iterates = jax.lax.scan(keep, first, None, length=iterations - 1)

  def back(d_matrix, matrix_ccX):
    return jax.vjp(functools.partial(_again, eps=eps), matrix_ccX)[1](d_matrix)[0], None

  d_first, _ = jax.lax.scan(back, _start(d_out), iterates, reverse=True)
  return (_finish(first_vjp(d_first)[0]),)


sinkhorn.defvjp(_forward, _backward)
