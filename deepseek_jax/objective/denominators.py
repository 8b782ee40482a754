"""What the sums of an objective are divided by: counted once on the batch of a whole step.

A step adds up the pieces of its batch, so no piece may divide by its own count.
Legend: B rows, S encoder slots, T decoder slots, m compression ratio.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Layout, real_slots


class Denominators(NamedTuple):
  """Float32 scalars; a count of 0 stands as 1, so that a batch of padding gives 0 and not NaN."""

  tokens: jax.Array  # sum of the loss weights
  rows: jax.Array  # rows with a real slot; one row is a sequence of the balance loss (ours)
  queries: dict[int, jax.Array]  # layer with an indexer -> queries that supervise it


def count(layout: Layout, cfg: ModelConfig) -> Denominators:
  """Counts a batch. A query supervises an indexer if it is a real token, no replay copy, and sees
  at least one entry; prompt tokens count like any other (model.md section 6.5).
  """
  start = cfg.num_layers if cfg.decoder_start is None else cfg.decoder_start
  queries = {
    spec.layer: _not_zero(_queries(layout, spec.ratio, decoder=spec.layer >= start))
    for spec in cfg.schedule()
    if spec.kind in ("full", "reindex")
  }
  return Denominators(
    tokens=_not_zero(jnp.sum(layout.weights)),
    rows=_not_zero(jnp.sum(jnp.any(real_slots(layout), axis=1))),
    queries=queries,
  )


def _queries(layout: Layout, ratio: int, *, decoder: bool) -> jax.Array:
  real_BS = real_slots(layout)
  if not decoder:
    return jnp.sum(real_BS & (layout.entry_end[ratio] > layout.entry_begin[ratio]))
  real_BT = jnp.take_along_axis(real_BS, jnp.maximum(layout.decoder_slots, 0), axis=1)
  sees_BT = layout.decoder_entry_end[ratio] > layout.decoder_entry_begin[ratio]  # padding: nothing
  return jnp.sum(real_BT & sees_BT)


def _not_zero(count: jax.Array) -> jax.Array:
  count = count.astype(jnp.float32)
  return jnp.where(count > 0, count, 1.0)
