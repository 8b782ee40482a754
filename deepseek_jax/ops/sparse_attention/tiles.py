"""Sizes that the kernels of sparse attention work in, which kernel is taken, and why.

Neighbouring queries choose overlapping entries: on a trained small model four of them read 1.9 to
2.3 times the rows of one, eight 2.4 to 3.2 times (docs/log.md). A GPU program still takes one
query: 64 heads fill the tensor cores' height, so a union of four would double the products to halve
the gathers, at 64 to 75% of a plain product's speed already; sharing helps it through the L2 cache.
A TPU program takes a tile of queries over their union (tpu_plan.py): its matrix unit is wider than
one query's heads, so up to its width the union costs no matrix time.
"""

import jax
import jax.numpy as jnp

# Keys of a block. 64 rows of 512 bfloat16 channels are 64 KiB: three of them are what fits a Hopper
# SM beside a query (docs/log.md), and 64 is the height of a warpgroup's matrix product.
KEYS = 64

# Queries whose contributions to the entries exist at a time in the backward pass of the release:
# 2,048 x 640 rows of 1 KiB are 1.25 GiB. 2,112, a multiple of the 132 multiprocessors, was not
# faster. In Pallas-Triton a chunk has more queries where they have fewer keys, for each chunk is a
# dozen kernels.
BACKWARD_QUERIES = 2048
BACKWARD_ROWS = BACKWARD_QUERIES * 640


# Below this many elements of q plain JAX is as fast. Measured on an H200, forward and backward of
# bfloat16: 2^18 elements (4 x 256 queries, 4 heads x 64) 0.257 ms in Triton and 0.166 ms in plain
# JAX, 2^23 (4 x 1,024 queries, 16 heads x 128) 0.709 and 2.834 ms.
_WORTH_A_KERNEL = 2**20


def slow(q_BQHd: jax.Array) -> tuple[str, ...]:
  """Implementations that plain JAX beats for such queries.

  Pallas-Triton multiplies float32 without tensor cores: 3.71 ms where plain JAX took 1.64 ms (4 x
  1,024 queries, 16 heads x 128, forward and backward on an H200).
  """
  small = q_BQHd.size < _WORTH_A_KERNEL
  return ("pallas_triton",) if small or q_BQHd.dtype == jnp.float32 else ()
