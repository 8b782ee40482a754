"""How every parameter starts: the one table, and the one way to declare a parameter.

| role | start | source |
|---|---|---|
| matrix, embedding, table | normal, cfg.init_std | ours; model.md 6.2 names 0.02 a port's default |
| gain (norms, Engram q/k) | 1 | model.md 6.2 |
| sink, bias | 0 | model.md 6.2 |
| hc scale | 0.01 | mHC paper, arXiv 2512.24880 |
| hc base: pre | +4 on stream (site mod c), else -4 | ours, so that streams differ |
| hc base: post, comb | 0, 4 I | ours |
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

_HC_BASE = 4.0


def zeros(key, shape, dtype=jnp.float32):
  del key
  return jnp.zeros(shape, dtype)


def ones(key, shape, dtype=jnp.float32):
  del key
  return jnp.ones(shape, dtype)


def hc_scale(key, shape, dtype=jnp.float32):
  del key
  return jnp.full(shape, 0.01, dtype)


def hc_base(site: int, streams: int):
  """Initializer of a site's static coefficients: `site` counts attention and FFN sites."""

  def initialize(key, shape, dtype=jnp.float32):
    del key, shape
    pre = jnp.where(jnp.arange(streams) == site % streams, _HC_BASE, -_HC_BASE)
    comb = _HC_BASE * jnp.eye(streams)
    return jnp.concatenate([pre, jnp.zeros(streams), comb.reshape(-1)]).astype(dtype)

  return initialize


def normal(std: float):
  return nn.initializers.normal(std)


def normal_rows(std: float, rows: int):
  """`normal` for the first rows of a matrix, 0 for those after them.

  JAX draws a number from its place in the flattened array alone, so that the first rows do not
  depend on how many follow; drawing all of them lets every device draw its own.
  """

  def initialize(key, shape, dtype=jnp.float32):
    drawn = normal(std)(key, shape, dtype)
    return jnp.where(jnp.arange(shape[0])[:, None] < rows, drawn, 0)

  return initialize


def declare(module: nn.Module, name: str, init, shape, axes: tuple[str | None, ...]) -> jax.Array:
  """A float32 parameter with its logical axes (deepseek_jax/sharding.py maps them to the mesh)."""
  boxed: Any = nn.with_logical_partitioning(init, axes)  # `param` takes the value out of its box
  return module.param(name, boxed, shape, jnp.float32)
