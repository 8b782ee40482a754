"""Layouts of packed documents. Legend: S slots, m compression ratio."""

import numpy as np
import pytest

from deepseek_jax.config import EngramConfig
from deepseek_jax.layout import IMAGE, PADDING, TEXT, Document, Layout, build_layout, stack_layouts
from deepseek_jax.ngram import NgramHash, hash_primes

LENGTHS = (5, 1, 4)  # the second and the third document start at odd slots


def documents(lengths=LENGTHS, next_token=-1):
  starts = np.cumsum((10, *lengths))
  return [Document(np.arange(s, s + n), next_token) for s, n in zip(starts, lengths, strict=False)]


def build(lengths=LENGTHS, slots=12, **options) -> Layout:
  return build_layout(documents(lengths), slots=slots, ratios=(1, 2), **options)


def test_a_packed_row_is_what_counting_by_hand_gives():
  row = build()
  expected = {
    "tokens": [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0],
    "positions": [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 0, 0],
    "document": [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, -1, -1],
    "segment_start": [0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 11, 12],
    "decoder_slots": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -1, -1],
    "targets": [11, 12, 13, 14, 0, 0, 17, 18, 19, 0, 0, 0],
    "weights": [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0],
  }
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(row, name), [values], err_msg=name)
  pairs = [[0, 1], [2, 3], [-1, -1], [6, 7], [8, 9], [-1, -1]]
  np.testing.assert_array_equal(row.entry_slots[2], [pairs])
  np.testing.assert_array_equal(row.entry_begin[2], [[0] * 5 + [3] * 5 + [0, 0]])
  np.testing.assert_array_equal(row.entry_end[2], [[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 0, 0]])
  singles = [[s] for s in range(10)] + [[-1], [-1]]
  np.testing.assert_array_equal(row.entry_slots[1], [singles])
  np.testing.assert_array_equal(row.entry_begin[1], [[0] * 5 + [5] + [6] * 4 + [0, 0]])
  np.testing.assert_array_equal(row.entry_end[1], [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]])
  assert not row.is_copy.any() and np.all(row.modality == TEXT)


def test_an_odd_start_shifts_pairs_so_that_they_never_span_two_documents():
  row = build((3, 4))
  # Slots 3-6: the pairs are (3, 4) and (5, 6), each named after its last slot.
  np.testing.assert_array_equal(
    row.entry_slots[2], [[[0, 1], [-1, -1], [3, 4], [5, 6], [-1, -1], [-1, -1]]]
  )
  np.testing.assert_array_equal(row.entry_end[2][0, :7], [0, 1, 1, 2, 3, 3, 4])
  np.testing.assert_array_equal(row.entry_begin[2][0, :7], [0, 0, 0, 2, 2, 2, 2])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_entries_are_complete_groups_with_unique_ids_and_are_seen_once_complete(ratio, seed):
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, 12, 8)
  slots = 96
  row = build_layout(documents(lengths), slots=slots, ratios=(ratio,), align=int(seed % 2 * 7 + 1))
  document, position = row.document[0], row.positions[0]
  cells = row.entry_slots[ratio][0]
  made = {tuple(cell) for cell in cells if cell[0] >= 0}
  expected = {
    tuple(range(s, s + ratio))
    for s in range(slots)
    if document[s] >= 0
    and position[s] % ratio == 0
    and np.all(document[s : s + ratio] == document[s])
    and len(document[s : s + ratio]) == ratio
  }
  assert made == expected, "every complete group of a document, once"
  for entry, cell in enumerate(cells):
    assert cell[0] < 0 or cell[-1] // ratio == entry
  for s in range(slots):
    visible = range(row.entry_begin[ratio][0, s], row.entry_end[ratio][0, s])
    seen = [tuple(cells[e]) for e in visible if cells[e][0] >= 0]
    own = [g for g in sorted(expected) if document[g[0]] == document[s] and g[-1] <= s]
    assert seen == (own if document[s] >= 0 else [])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_document_shorter_than_a_group_has_no_entry_and_sees_none(length):
  row = build_layout(documents((2, length)), slots=8, ratios=(4,))
  assert np.all(row.entry_slots[4] == PADDING)
  np.testing.assert_array_equal(row.entry_begin[4], row.entry_end[4])


def test_padding_has_no_window_no_entries_no_weight_and_no_decoder_slot():
  row = build((), slots=4)
  assert np.all(row.segment_start > np.arange(4)) and np.all(
    row.decoder_segment_start > np.arange(4)
  )
  assert np.all(row.document == PADDING) and np.all(row.decoder_slots == PADDING)
  assert np.all(row.weights == 0)
  for m in (1, 2):
    assert np.all(row.entry_slots[m] == PADDING)
    np.testing.assert_array_equal(row.entry_begin[m], row.entry_end[m])


def test_decoder_slots_are_the_encoder_slots_one_to_one():
  row = build()
  np.testing.assert_array_equal(row.decoder_segment_start, row.segment_start)
  for m in (1, 2):
    np.testing.assert_array_equal(row.decoder_entry_begin[m], row.entry_begin[m])
    np.testing.assert_array_equal(row.decoder_entry_end[m], row.entry_end[m])


def test_the_token_after_a_document_is_the_target_of_its_last():
  row = build_layout(documents((3, 2), next_token=7), slots=6, ratios=())
  np.testing.assert_array_equal(row.targets, [[11, 12, 7, 14, 7, 0]])
  np.testing.assert_array_equal(row.weights, [[1, 1, 1, 1, 1, 0]])


def test_aligned_documents_start_at_multiples_and_leave_padding_between():
  row = build((3, 4), slots=12, align=8)
  np.testing.assert_array_equal(row.document, [[0] * 3 + [-1] * 5 + [1] * 4])
  np.testing.assert_array_equal(row.segment_start[0, 8:], [8] * 4)
  np.testing.assert_array_equal(row.entry_begin[2][0, 8:], [4] * 4)


def test_engram_rows_are_hashed_per_document_and_missing_in_padding():
  primes = hash_primes(1, 2, 11)
  cfg = EngramConfig(
    layers=(1,), table_rows=(sum(primes[0]),), max_ngram=3, heads=1, prime_start=11,
    compressed_vocab=64,
  )  # fmt: skip
  hashing = NgramHash(cfg, np.arange(64, dtype=np.int32))
  modality = np.array([TEXT, IMAGE, TEXT], np.int32)
  items = [Document(np.array([5, 6, 7, 8])), Document(np.array([7, 8, 9]), modality=modality)]
  row = build_layout(items, slots=9, ratios=(), hashing=hashing)
  assert row.engram_rows.shape == (1, 9, 1, 2) and row.engram_rows.dtype == np.int32
  np.testing.assert_array_equal(row.engram_rows[0, :4], hashing.rows(items[0].tokens))
  want = hashing.rows(items[1].tokens, modality == IMAGE)
  np.testing.assert_array_equal(row.engram_rows[0, 4:7], want)
  assert np.all(row.engram_rows[0, 7:] == PADDING)
  np.testing.assert_array_equal(row.modality[0, 4:7], modality)


def test_stacked_rows_stay_in_order():
  batch = stack_layouts([build((3,)), build((4, 5)), build(())])
  assert batch.tokens.shape == (3, 12) and batch.entry_slots[2].shape == (3, 6, 2)
  np.testing.assert_array_equal(batch.document[1], build((4, 5)).document[0])
  np.testing.assert_array_equal(batch.entry_end[2][0], build((3,)).entry_end[2][0])


def test_every_field_has_its_dtype():
  row = build()
  for name, value in row._asdict().items():
    wanted = {"is_copy": np.bool_, "weights": np.float32}.get(name, np.int32)
    for array in value.values() if isinstance(value, dict) else [value]:
      assert array.dtype == wanted, name


@pytest.mark.parametrize(
  ("lengths", "slots", "sentence"),
  [
    ((3, 0), 8, "document 1 is empty."),
    ((5, 4), 8, "document 1 needs slots 5 to 8, the row has 8."),
    ((3,), 9, r"slots is 9, which is not a multiple of the ratios \[2\]."),
  ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(lengths, slots, sentence):
  with pytest.raises(ValueError, match=f"^{sentence}$"):
    build(lengths, slots=slots)
