"""The shapes that the rows of a run have, one or two, and its step compiled for each of them.

Steps with replay have more encoder slots, for copies, and fewer decoder slots. They alternate with
exact ones by a schedule (data/replay.py), so that nothing is compiled while the run goes on.
Legend: S encoder slots, T decoder slots.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from configs.schema import Settings
from deepseek_jax.layout import Layout
from deepseek_jax.step import TrainState
from train.batches import abstract_batch
from train.programs import Programs

Step = Callable[[TrainState, Layout], tuple[TrainState, dict[str, jax.Array]]]


def abstract_batches(settings: Settings, mesh: Mesh) -> list[Layout]:
  """Shapes and shardings of the batches that the steps of the run take."""
  share = settings.data.replay.share
  kinds = [replayed for replayed, occurs in ((False, share < 1), (True, share > 0)) if occurs]
  return [abstract_batch(settings, mesh, replayed=replayed) for replayed in kinds]


def compile_step(programs: Programs, batches: list[Layout]) -> Step:
  """The step for batches of these shapes; call it under `jax.set_mesh` of their mesh."""
  compiled = {
    _shape(batch): programs.step.lower(programs.abstract_state, batch).compile()
    for batch in batches
  }
  return lambda state, batch: compiled[_shape(batch)](state, batch)


def _shape(batch: Layout) -> tuple[Any, ...]:
  return batch.tokens.shape, batch.decoder_slots.shape
