"""Grouped matmul: the products into and out of the experts' hidden width.

Legend: P rows, G experts, K input width, N output width.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.ops.grouped_matmul import grouped_matmul
from tests.bench import measure
from tests.bench.case import Case, Request, Sizes

IMPLEMENTATIONS = ("pallas_gpu", "ragged_dot", "xla")  # the reference copies a matrix per block
_CHECKED_EXPERTS = 2


def cases(request: Request) -> Iterator[Case]:
  sizes = request.sizes
  widths = {
    "up": (sizes.model_width, sizes.expert_width),
    "down": (sizes.expert_width, sizes.model_width),
  }
  for tokens in request.tokens:
    block_rows, rows_G, total = _load(sizes, tokens)
    for product, (width_in, width_out) in widths.items():
      shape = {"tokens": tokens, "product": product, "block_rows": block_rows, "rows": total}
      arrays = _inputs(total, rows_G, width_in, width_out)
      for name in request.implementations_for(tokens):
        yield from _of_implementation(sizes, shape, name, arrays)


def _load(sizes: Sizes, tokens: int):
  """Rows of a block, of each expert, and of the padded whole, for a router that picks at random."""
  copies = tokens * sizes.experts_per_token
  experts = np.random.default_rng(0).integers(sizes.experts, size=copies)
  load_G = np.bincount(experts, minlength=sizes.experts)
  block_rows = 128 if copies >= 512 * sizes.experts else 64
  rows_G = -(-load_G // block_rows) * block_rows
  total = (copies + sizes.experts * (block_rows - 1)) // block_rows * block_rows
  return block_rows, rows_G, total


def _inputs(total: int, rows_G, width_in: int, width_out: int):
  normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
  used_P1 = jnp.arange(total)[:, None] < int(rows_G.sum())
  x_PK = jnp.where(used_P1, normal(0, total, width_in), 0)
  d_y_PN = jnp.where(used_P1, normal(2, total, width_out), 0)
  w_GKN = normal(1, len(rows_G), width_in, width_out) * width_in**-0.5
  return x_PK, w_GKN.astype(jnp.bfloat16), jnp.asarray(rows_G, jnp.int32), d_y_PN


def _of_implementation(sizes: Sizes, shape, name, arrays) -> Iterator[Case]:
  x_PK, w_GKN, rows_G, _ = arrays
  multiply = lambda x_PK, w_GKN, rows_G: grouped_matmul(
    x_PK, w_GKN, rows_G, block_rows=shape["block_rows"], implementation=name
  )

  def both(x_PK, w_GKN, rows_G, d_y_PN):
    y_PN, gradients = jax.vjp(lambda x, w: multiply(x, w, rows_G), x_PK, w_GKN)
    return y_PN, *gradients(d_y_PN)

  copies = shape["tokens"] * sizes.experts_per_token
  flops = 2.0 * copies * w_GKN.shape[1] * w_GKN.shape[2]
  yield Case(
    shape, name, "forward", multiply, lambda: (x_PK, w_GKN, rows_G), flops,
    errors=lambda program: _errors(arrays, program(x_PK, w_GKN, rows_G)),
  )  # fmt: skip
  yield Case(
    shape, name, "forward+backward", both, lambda: arrays, 3 * flops,
    errors=lambda program: _errors(arrays, *program(*arrays)),
  )  # fmt: skip


def _errors(arrays, y_PN, d_x_PK=None, d_w_GKN=None) -> dict[str, float]:
  """Of the experts in the middle, whose rows are multiplied one after the other."""
  x_PK, w_GKN, rows_G, d_y_PN = arrays
  middle = len(rows_G) // 2
  errors: dict[str, float] = {}
  exact = lambda a, b: jnp.matmul(
    a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
  )
  for group in range(middle, min(middle + _CHECKED_EXPERTS, len(rows_G))):
    start = int(jnp.sum(rows_G[:group]))
    own = slice(start, start + int(rows_G[group]))
    pairs = {"y": (y_PN[own], exact(x_PK[own], w_GKN[group]))}
    if d_x_PK is not None:
      pairs["d_x"] = d_x_PK[own], exact(d_y_PN[own], w_GKN[group].T)
      pairs["d_w"] = d_w_GKN[group], exact(x_PK[own].T, d_y_PN[own])
    for name, (got, want) in pairs.items():
      errors[name] = max(errors.get(name, 0.0), measure.relative_error(got, want))
  return errors
