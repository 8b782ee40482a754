"""Muon: the momentum of every logical matrix, made orthogonal and rescaled.

`optax.contrib.muon` fits where it describes logical matrices, which MuonDimensionNumbers do here
too, and tests compare with its iteration. Its transformation does not fit: it corrects momentum and
gradient for their start by different factors, where the recipe corrects neither; it keeps the
coefficients in the state, so that a restored run would not see new ones; it flattens experts and
layers into one axis, which a mesh cannot keep cut; and it adds 1e-8 to a norm that may be smaller.

Legend: b axes that count matrices, m rows, n columns, m <= n, k rows again.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from deepseek_jax.ops.matmul import einsum_f32
from deepseek_jax.sharding import constrain, mesh_to_split

# Eight steps that lift every singular value close to 1, two that settle there (model.md 6.3).
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
STACKED = 2**27  # most values of a device that are worked on at a time: 512 MiB for each temporary
EPS = 1e-20  # added to the norm of a matrix, so that one without a gradient stays 0

LogicalMatrix = Callable[[tuple[Any, ...]], MuonDimensionNumbers]


def scale_by_muon(
  logical_matrix: LogicalMatrix,
  stored_along: Callable[[tuple[Any, ...]], str | None] = lambda _: None,
  *,
  momentum: float,
  rms: float,
  dtype: str,
) -> optax.GradientTransformation:
  """The direction of Muon; the learning rate and its sign come after it.

  M <- momentum M + G;  update = rms sqrt(max(m, n)) NS(momentum M + G)

  so that every logical matrix moves with a root mean square of about rms. Its state is M, float32,
  named like the parameters. Source: model.md sections 6.2 and 6.3.

  Args:
    logical_matrix: path of a parameter -> which of its axes are the matrix.
    stored_along: path of a parameter -> logical axis (sharding.RULES) of the axis that counts its
      matrices, the one before repeated layers.
    momentum: of Nesterov's look-ahead.
    rms: of an update.
    dtype: see `newton_schulz`.
  """

  def orthogonal(updates: optax.Updates, params: Any = None) -> optax.Updates:
    del params
    leaves, tree = jax.tree.flatten_with_path(updates)
    views = [_View(x.shape, logical_matrix(path)) for path, x in leaves]
    x_bmn = [view.matrices(x) for (_, x), view in zip(leaves, views, strict=True)]
    done = _together(x_bmn, [stored_along(path) for path, _ in leaves], dtype)
    scaled = [x * (rms * math.sqrt(x.shape[-1])) for x in done]
    return tree.unflatten(view.array(x) for view, x in zip(views, scaled, strict=True))

  return optax.chain(
    optax.trace(momentum, nesterov=True, accumulator_dtype=jnp.float32),
    optax.stateless(orthogonal),
  )


class _View:
  """An array as its logical matrices [b, m, n], and the way back."""

  def __init__(self, shape: tuple[int, ...], axes: MuonDimensionNumbers):
    inside = [
      tuple(axis % len(shape) for axis in ((of,) if isinstance(of, int) else of))
      for of in (axes.output_axis, axes.reduction_axis)
    ]
    sizes = [math.prod(shape[axis] for axis in of) for of in inside]
    short, long = inside if sizes[0] <= sizes[1] else reversed(inside)
    # Experts before layers: they are cut already, and the first axis is the first to be cut.
    counted = [axis for axis in reversed(range(len(shape))) if axis not in (*short, *long)]
    self.order = (*counted, *short, *long)
    self.moved = tuple(shape[axis] for axis in self.order)
    self.shape = (*self.moved[: len(counted)], min(sizes), max(sizes))

  def matrices(self, x: jax.Array) -> jax.Array:
    return x.transpose(self.order).reshape(self.shape)

  def array(self, x_bmn: jax.Array) -> jax.Array:
    back = sorted(range(len(self.order)), key=self.order.__getitem__)
    return x_bmn.reshape(self.moved).transpose(back)


def _together(arrays: list[jax.Array], stored: list[str | None], dtype: str) -> list[jax.Array]:
  """`newton_schulz` of each, those of equal shapes (layers, mostly) stacked into one.

  So there are few loops of large products, and more matrices to give to devices.
  """
  mesh = mesh_to_split()
  most = STACKED * (mesh.size if mesh is not None else 1)
  alike: dict[tuple, list[int]] = {}
  for number, (x_bmn, along) in enumerate(zip(arrays, stored, strict=True)):
    alike.setdefault((x_bmn.shape, along), []).append(number)
  done = list(arrays)
  for (shape, along), numbers in alike.items():
    for some in itertools.batched(numbers, max(1, most // math.prod(shape))):
      stacked = newton_schulz(jnp.stack([arrays[n] for n in some], axis=-3), dtype, along)
      for place, number in enumerate(some):
        done[number] = stacked[..., place, :, :]
  return done


def newton_schulz(x_bmn: jax.Array, dtype: str = "float32", along: str | None = None) -> jax.Array:
  """U V^T, nearly, of each matrix U S V^T.

  X <- X / (|X| + eps);  ten times: A = X X^T, X <- a X + (b A + c A A) X

  On a mesh every device works on matrices of its own, as far as the first axis that counts them
  goes, and then on columns of its own.

  Args:
    x_bmn: float32, m <= n; the work grows with m m n.
    dtype: of the operands of products: "float32", or "bfloat16", where every product still adds up
      in float32 and X stays float32 between them.
    along: logical axis along which the first axis of b is stored.
  """
  counted = ("matrices", *[None] * (x_bmn.ndim - 3)) if x_bmn.ndim > 2 else ()
  cut = lambda x_bmn: constrain(x_bmn, *counted, None, "embed")
  # From rows to columns first, and only then to matrices: asked for both moves at once, the
  # compiler gathers all matrices on every device. The same on the way back.
  by_columns = lambda x_bmn: constrain(x_bmn, *(along, *counted[1:])[: len(counted)], None, "embed")
  x_bmn = cut(by_columns(x_bmn))
  norm = jnp.sqrt(jnp.sum(jnp.square(x_bmn), axis=(-2, -1), keepdims=True))

  def step(x_bmn: jax.Array, abc: jax.Array) -> tuple[jax.Array, None]:
    a, b, c = abc
    square_bmk = _product("...mn,...kn->...mk", x_bmn, x_bmn, dtype)
    square_bmk = constrain(square_bmk, *counted, None, None)
    polynomial_bmk = b * square_bmk + c * _product(
      "...mk,...kl->...ml", square_bmk, square_bmk, dtype
    )
    return cut(a * x_bmn + _product("...mk,...kn->...mn", polynomial_bmk, x_bmn, dtype)), None

  x_bmn, _ = jax.lax.scan(step, x_bmn / (norm + EPS), jnp.array(COEFFICIENTS, jnp.float32))
  return by_columns(x_bmn)


def _product(spec: str, x: jax.Array, y: jax.Array, dtype: str) -> jax.Array:
  if dtype == "float32":  # elsewhere than on a CPU the default precision has fewer bits
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST)
  return einsum_f32(spec, x.astype(dtype), y.astype(dtype))
