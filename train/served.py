"""What serving changes: which approximations a model allows, and how far two forwards agree.

Legend: B rows, T decoder slots, D width, V vocabulary, K buckets.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Array, Layout
from deepseek_jax.ops.agreement import Agreement, token_agreement
from deepseek_jax.ops.table_lookup import start_rows


class Match(NamedTuple):
  """Where the learned tokens of one layout stand in another one of the same rows."""

  slot_BT: Array  # int32 decoder slot of the other layout; 0 for a token that is not learned
  bucket_BT: Array  # int32 number of its bucket


def match_slots(exact: Layout, served: Layout, edges: Sequence[int]) -> Match:
  """Pairs the learned tokens of `served` with those of a layout where T = S, one to one; NumPy.

  A token is in the first bucket whose edge is above its number in its response, which is counted
  from the first learned token of its segment.
  """
  slot_BT = np.zeros(served.decoder_slots.shape, np.int32)
  bucket_BT = np.zeros_like(slot_BT)
  for row, weights_T in enumerate(served.weights):
    (learned,) = np.nonzero(weights_T)
    start = served.decoder_slots[row, learned]
    document_S = exact.document[row]
    documents, first = np.unique(document_S, return_index=True)
    own = np.searchsorted(documents, served.document[row, start])
    slot_BT[row, learned] = first[own] + served.positions[row, start]
    _, begin, of = np.unique(
      served.decoder_segment_start[row, learned], return_index=True, return_inverse=True
    )
    number = learned - learned[begin][of]
    bucket_BT[row, learned] = np.searchsorted(edges, number, side="right")
  return Match(slot_BT, bucket_BT)


def matched_agreement(
  p_hidden_BTD: jax.Array,
  q_hidden_BTD: jax.Array,
  head_VD: jax.Array,
  layout: Layout,
  match: Match,
  **numerics: Any,
) -> Agreement:
  """token_agreement for each decoder slot of q's layout and the one of p that it is matched with.

  p is the distribution that is held to be right; `numerics` are token_agreement's. Only learned
  tokens are matched, what it says of the other slots means nothing.
  """
  matched_BTD = start_rows(p_hidden_BTD, match.slot_BT)
  return token_agreement(matched_BTD, q_hidden_BTD, head_VD, layout.targets, **numerics)


def row_sums(agreement: Agreement, layout: Layout, match: Match, buckets: int) -> jax.Array:
  """float32 [B, K, 5]: of the learned tokens of each row and bucket their loss weight, and weighted
  sums of what `Agreement` has of them.
  """
  values_BT5 = jnp.stack([jnp.ones_like(layout.weights), *agreement], axis=-1)
  in_bucket_BTK = jax.nn.one_hot(match.bucket_BT, buckets) * layout.weights[..., None]
  high = jax.lax.Precision.HIGHEST
  return jnp.einsum("btk,btv->bkv", in_bucket_BTK, values_BT5, precision=high)


def approximations(model: ModelConfig) -> dict[str, tuple[ModelConfig, ModelConfig]]:
  """Of "fp4" (compressed entries) and "pool" (candidates): the model without and with it.

  One that the model's sizes do not allow is left out; a pool that is off would be the decoder's.
  """
  numerics, indexer = model.numerics, model.indexer
  fp4 = lambda on: dataclasses.replace(model, numerics=dataclasses.replace(numerics, main_fp4=on))
  pool = lambda source: dataclasses.replace(
    model, indexer=dataclasses.replace(indexer, pool_source=source)
  )
  source = model.decoder_start if indexer.pool_source is None else indexer.pool_source
  found = {"fp4": (fp4(False), fp4(True)), "pool": (pool(None), pool(source))}
  return {
    name: (without, with_it)
    for name, (without, with_it) in found.items()
    if without != with_it and not without.problems() and not with_it.problems()
  }
