"""Packing loses nothing and keeps every target; rows survive the way to disk."""

import numpy as np
import pytest

from data.prepare.packing import pack
from data.rows import decode_row, encode_row, token_dtype
from deepseek_jax.layout import build_layout


@pytest.mark.parametrize("slots", [1, 2, 7, 64])
def test_packing_keeps_every_token_once_with_its_target(slots):
  random = np.random.default_rng(slots)
  documents = [random.integers(0, 50, length) for length in (1, 30, 2, 7, 14, 1, 63)]
  rows = list(pack(documents, slots))
  assert [sum(len(piece.tokens) for piece in row) for row in rows[:-1]] == [slots] * (len(rows) - 1)
  pieces = [piece for row in rows for piece in row]
  np.testing.assert_array_equal(
    np.concatenate([piece.tokens for piece in pieces]), np.concatenate(documents)
  )
  targets = []
  for row in rows:
    layout = build_layout(row, slots=slots, ratios=())
    targets += layout.targets[layout.weights > 0].tolist()
  assert targets == [token for document in documents for token in document[1:]]


@pytest.mark.parametrize("vocab", [300, 2**16, 2**16 + 1])
def test_a_row_survives_the_way_to_disk(vocab):
  documents = [np.array([vocab - 1, 0, 5]), np.array([7])]
  row = next(pack([*documents, np.arange(20)], 8))
  dtype = token_dtype(vocab)
  read = decode_row(encode_row(row, dtype), dtype)
  assert [piece.next_token for piece in read] == [-1, -1, 4]
  for piece, original in zip(read, row, strict=True):
    assert piece.tokens.dtype == np.int32
    np.testing.assert_array_equal(piece.tokens, original.tokens)
