"""What a layer tells about its condition besides its output: a total and a count for each quantity.

Totals and counts add up over layers' repetitions and over pieces of a batch, and their ratio is a
mean (objective/health.py). Nothing here has a gradient; a model that is applied without the
collection computes nothing of it.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

COLLECTION = "health"


def report(module: nn.Module, name: str, total: jax.Array, count: jax.typing.ArrayLike) -> None:
  """Leaves float32 [2] under the module's path."""
  if module.is_initializing():
    return
  pair_2 = jnp.stack([jnp.asarray(x, jnp.float32) for x in (total, count)])
  keep = lambda before, new: new
  module.sow(COLLECTION, name, jax.lax.stop_gradient(pair_2), reduce_fn=keep, init_fn=lambda: None)
