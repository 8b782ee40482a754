"""The batches of a run: their shape, the pipelines that give them, their way onto the devices."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Settings
from data.pipeline import Pipeline, ValidationPass, open_pipeline, open_validation
from deepseek_jax.config import EngramConfig
from deepseek_jax.layout import Layout, build_layout
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sharding import batch_sharding


def open_training(settings: Settings) -> Pipeline:
  """This host's training batches. Errors as open_pipeline has them."""
  return open_pipeline(
    settings.data,
    ratios=settings.model.ratios,
    engram=_engram(settings),
    host=jax.process_index(),
    hosts=jax.process_count(),
  )


def open_held_out(settings: Settings) -> ValidationPass:
  """This host's validation batches. Errors as open_validation has them."""
  return open_validation(
    settings.data,
    ratios=settings.model.ratios,
    engram=_engram(settings),
    host=jax.process_index(),
    hosts=jax.process_count(),
  )


def empty_row(settings: Settings) -> Layout:
  """A batch of one row of padding."""
  engram = _engram(settings)
  hashing = None if engram is None else NgramHash(engram, np.zeros(0, np.int32))
  return build_layout([], slots=settings.data.slots, ratios=settings.model.ratios, hashing=hashing)


def abstract_batch(settings: Settings, mesh: Mesh) -> Layout:
  """Shapes and shardings of a whole batch."""
  rows, sharding = settings.data.batch_rows, batch_sharding(mesh)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=sharding),
    empty_row(settings),
  )


def placer(mesh: Mesh) -> Callable[[Layout], Layout]:
  """Puts the rows of this host onto its devices, as its part of the batch of all hosts."""
  sharding = batch_sharding(mesh)
  put = lambda x: jax.make_array_from_process_local_data(sharding, x)
  return lambda layout: jax.tree.map(put, layout)


def _engram(settings: Settings) -> EngramConfig | None:
  """None for a model without tables."""
  return settings.model.engram if settings.model.engram.layers else None
