"""Counts of packed rows with holes, checked against counting slot by slot."""

import jax.numpy as jnp
import numpy as np

from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Document, build_layout, real_slots, stack_layouts
from deepseek_jax.objective.denominators import count

# Ratio 2 before the decoder, ratio 1 in it, where layer 3 chooses anew.
CFG = ModelConfig(
  compress_ratios=(0, 2, 1, 1, 1),
  kv_sources=(1, 2),
  index_sources=(1, 2, 3),
  decoder_start=2,
)


def row(*lengths, align=1):
  documents = [Document(np.arange(n, dtype=np.int32)) for n in lengths]
  return build_layout(documents, slots=32, ratios=(1, 2), align=align)


def test_packed_rows_with_holes_are_counted_slot_by_slot():
  layout = stack_layouts([row(5, 1, 7), row(3, 6, align=8), row()])
  got = count(layout, CFG)
  assert got.tokens == (4 + 0 + 6) + (2 + 5)  # the last token of a document has no next one
  assert got.rows == 2
  # Ratio 2: the first token of each document sees no complete pair.
  assert {n: float(q) for n, q in got.queries.items()} == {
    1: (4 + 0 + 6) + (2 + 5),
    2: 13 + 9,
    3: 13 + 9,
  }


def test_layers_that_only_reuse_a_choice_have_no_count():
  assert sorted(count(row(4), CFG).queries) == [1, 2, 3]


def test_replay_copies_count_nowhere():
  layout = row(10)
  copies = np.zeros((1, 32), bool)
  copies[0, 2:6] = True
  got = count(layout._replace(is_copy=copies), CFG)
  assert real_slots(layout._replace(is_copy=copies)).sum() == 6
  assert got.queries[1] == 9 - 4 and got.queries[2] == 10 - 4


def test_decoder_layers_count_decoder_slots_alone():
  layout = row(20)
  tail = np.full((1, 8), -1, np.int32)
  tail[0, :5] = np.arange(15, 20)
  at_tail = lambda x: np.where(tail >= 0, x[0, np.maximum(tail, 0)], 0)
  layout = layout._replace(
    decoder_slots=tail,
    decoder_entry_begin={m: at_tail(v) for m, v in layout.entry_begin.items()},
    decoder_entry_end={m: at_tail(v) for m, v in layout.entry_end.items()},
  )
  got = count(layout, CFG)
  assert got.queries[1] == 19 and got.queries[2] == got.queries[3] == 5


def test_without_a_decoder_every_layer_counts_encoder_slots():
  cfg = ModelConfig(
    compress_ratios=(2, 2), kv_sources=(0,), index_sources=(0, 1), decoder_start=None
  )
  assert {n: float(q) for n, q in count(row(9), cfg).queries.items()} == {0: 8, 1: 8}


def test_fractional_weights_below_one_are_not_rounded_up():
  layout = row(2)
  got = count(layout._replace(weights=layout.weights * 0.25), CFG)
  assert got.tokens == 0.25


def test_padding_alone_stands_as_one():
  got = count(row(), CFG)
  assert got.tokens == got.rows == 1
  assert all(q == 1 for q in got.queries.values())
  assert got.tokens.dtype == got.rows.dtype == got.queries[1].dtype == jnp.float32
