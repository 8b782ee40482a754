"""Values that travel between layers and out of the model.

Legend: B rows, S encoder slots, T decoder slots, Q either of them, N entry cells, m ratio, K chosen
entries, L Engram tables, R table rows of a token, c streams, D width, d head width, i indexer
width, E experts, V vocabulary, W pool blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# Observes a named value and returns what the model goes on with: the identity, except in `verify`,
# which records the value and may put a recorded one in its place.
Tap = Callable[[str, jax.Array], jax.Array]


def no_tap(name: str, value: jax.Array) -> jax.Array:
  del name
  return value


class Slots(NamedTuple):
  """What a block needs to know about the slots it works on (encoder or decoder)."""

  positions_BQ: jax.Array  # int32
  is_vision_BQ: jax.Array  # bool, inside an image span
  counts_BQ: jax.Array  # bool, a real token that is no replay copy
  segment_start_BQ: jax.Array  # int32
  entry_begin_BQ: dict[int, jax.Array]  # m -> int32
  entry_end_BQ: dict[int, jax.Array]
  engram_rows_BQLR: jax.Array  # int32 table rows, -1 in padding


class Entries(NamedTuple):
  """Where the compressed entries of one ratio come from."""

  slots_BNm: jax.Array  # int32 encoder slots, -1 in cells without an entry
  positions_BN: jax.Array  # int32 position of the first token
  exists_BN: jax.Array  # bool


class LayerCarry(NamedTuple):
  """Everything that flows from one layer to the next; None before the first layer that sets it."""

  streams_BQcD: jax.Array  # compute dtype
  pre_mix_BQc: jax.Array  # float32, collapse weights made at the site before
  shared_kv_BNd: Any  # entries of the last KV source
  index_keys_BNi: Any  # compute dtype, before fake quantization
  selection_BQK: Any  # int32 ascending, -1 at the end
  selection_plan: Any  # what the attention kernels derive from it, see plan_selection
  pool_BQW: Any  # int32 ascending block ids of the candidate pool, -1 at the end


class LayerAux(NamedTuple):
  """What a layer reports; sums over the slots that count, so that batches can be added up."""

  load_text_E: jax.Array  # float32, text slots routed to each expert
  load_vision_E: jax.Array  # float32, image-span slots
  balance: jax.Array  # float32 [], sum over rows of sum_e f_e P_e
  indexer_kl: jax.Array  # float32 [], sum over queries; 0 in layers without an indexer
  rounds: jax.Array  # float32 [], in which tokens reached their experts; 1 but for uneven loads


class ModelOutput(NamedTuple):
  hidden_BTD: jax.Array  # float32, after the last norm
  head_VD: jax.Array  # float32 output embedding
  layers: dict  # LayerAux per layer, nested and stacked like the parameters
  health: Any = None  # reports of nn/health.py, nested likewise; None where nobody asked for them
