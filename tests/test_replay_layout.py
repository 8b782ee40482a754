"""Layouts with turns and prefix hits. Legend: S slots, T decoder slots, W window."""

import re

import numpy as np
import pytest

from deepseek_jax.config import EngramConfig
from deepseek_jax.layout import (
  IMAGE,
  NO_HIT,
  PADDING,
  TEXT,
  Document,
  Layout,
  Replay,
  build_layout,
  decoder_slots_of,
)
from deepseek_jax.ngram import NgramHash, hash_primes


def documents(lengths):
  starts = np.cumsum((10, *lengths))
  return [Document(np.arange(s, s + n)) for s, n in zip(starts, lengths, strict=False)]


W, T = 4, 16


def build_turns(items, turns, cuts=None, *, slots=24, ratios=(1, 2), **options) -> Layout:
  replay = Replay(**{"window": W, "decoder_slots": T} | options)
  return build_layout(items, turns, cuts, slots=slots, ratios=ratios, replay=replay)


def test_a_turn_with_a_hit_is_what_counting_by_hand_gives():
  """Of 10 tokens 5 are found again: 1 to 4 stand a second time, as copies, before token 5."""
  row = build_turns(documents((10,)), [[(8, 10)]], [[5]], slots=16)
  expected = {
    "tokens": [10, 11, 12, 13, 14, 11, 12, 13, 14, 15, 16, 17, 18, 19, 0, 0],
    "positions": [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0],
    "is_copy": [0] * 5 + [1] * 4 + [0] * 7,
    "document": [0] * 14 + [-1] * 2,
    "segment_start": [0] * 5 + [5] * 9 + [15, 16],
    # Window 4 before the response: positions 4 to 9, of which 4 lies below the hit.
    "decoder_slots": [8, 9, 10, 11, 12, 13] + [-1] * 10,
    "decoder_segment_start": [0] * 6 + [*range(7, 17)],
    "targets": [15, 16, 17, 18, 19, 0] + [0] * 10,
    "weights": [0, 0, 0, 1, 1, 0] + [0] * 10,
  }
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(row, name), [values], err_msg=name)
  # The pair of positions 4 and 5 is made of the copy of 4; no copy makes an entry.
  pairs = [[0, 1], [2, 3], [-1, -1], [-1, -1], [8, 9], [10, 11], [12, 13], [-1, -1]]
  np.testing.assert_array_equal(row.entry_slots[2][0], pairs)
  singles = [[0], [1], [2], [3], [4], [-1], [-1], [-1], [-1], [9], [10], [11], [12], [13]]
  np.testing.assert_array_equal(row.entry_slots[1][0, :14], singles)
  # A copy sees what its original sees.
  ends = [0, 1, 1, 2, 2, 1, 1, 2, 2, 5, 5, 6, 6, 7, 0, 0]
  np.testing.assert_array_equal(row.entry_end[2][0], ends)
  np.testing.assert_array_equal(row.decoder_entry_end[2][0, :6], [2, 5, 5, 6, 6, 7])
  np.testing.assert_array_equal(row.decoder_entry_end[1][0, :6], [5, 10, 11, 12, 13, 14])
  assert not row.decoder_entry_begin[1].any() and not row.decoder_entry_begin[2].any()
  kept = build_turns(documents((10,)), [[(8, 10)]], [[5]], slots=16, short_input="exact")
  np.testing.assert_array_equal(kept.decoder_slots[0, :6], [4, 9, 10, 11, 12, 13])


def what_a_server_sees(tokens, turns, hits):
  """By position, what each query sees; kinds are "read" once and "again" after a hit.

  Returns: (encoder: {(kind, hit, position): window}, decoder: [(position, start, window)]), windows
  as sets of what they hold; and the groups of two as (first, second), each (kind, hit, position).
  """
  cache, encoder, decoder, groups, waiting = {}, {}, [], {}, {}

  def read(kind, hit, positions):
    for p in positions:
      cache[p] = waiting[p] = (kind, hit, p)
      encoder[kind, hit, p] = {cache[q] for q in range(p - W + 1, p + 1) if q in cache}
      if kind == "read" and p % 2:
        groups[p // 2] = waiting[p - 1], waiting[p]

  done, number = 0, 0
  for (begin, end), hit in zip(turns, hits, strict=True):
    if hit:
      read("read", 0, range(done, hit))
      cache.clear()
      read("again", hit, range(hit - W, hit))
      done = hit
    read("read", 0, range(done, end))
    done, segment = end, {}
    for p in range(max(0, begin - W), end):
      start = ("again", hit, p) if p < hit else ("read", 0, p)
      segment[p] = number
      number += 1
      window = {segment[q] for q in range(p - W + 1, p + 1) if q in segment}
      decoder.append((start, window, p))
  read("read", 0, range(done, tokens))
  return encoder, decoder, groups


@pytest.mark.parametrize("seed", range(20))
def test_windows_and_entries_are_those_of_a_server(seed):
  """Random conversations in a row, at odd starts too, with hits of every kind."""
  rng = np.random.default_rng(seed)
  lengths, turns, cuts = [], [], []
  for _ in range(3):
    position, own, hits = 0, [], []
    for _ in range(rng.integers(1, 4)):
      begin = position + int(rng.integers(1, 12))
      legal = range(max(position, W + 1), begin)
      hits.append(int(rng.choice(legal)) if len(legal) and rng.random() < 0.7 else NO_HIT)
      own.append((begin, begin + int(rng.integers(1, 5))))
      position = own[-1][1]
    lengths.append(position + int(rng.integers(0, 3)))
    turns.append(own)
    cuts.append(hits)
  row = build_turns(documents(lengths), turns, cuts, slots=200, decoder_slots=150)
  slots, number, origin = np.arange(200), 0, {}  # which slot holds what
  for d, hits in enumerate(cuts):
    boundaries = iter(hit for hit in hits if hit)
    hit = 0
    for s in slots[row.document[0] == d]:
      if row.is_copy[0, s] and not row.is_copy[0, s - 1]:
        hit = next(boundaries)
      kind = ("again", hit) if row.is_copy[0, s] else ("read", 0)
      origin[d, *kind, int(row.positions[0, s])] = int(s)
  assert len(origin) == (row.document >= 0).sum()
  for d, (length, own, hits) in enumerate(zip(lengths, turns, cuts, strict=True)):
    encoder, decoder, groups = what_a_server_sees(length, own, hits)
    at = lambda name, d=d: origin[d, *name]
    for name, window in encoder.items():
      s = at(name)
      first = max(row.segment_start[0, s], s - W + 1)
      assert set(range(first, s + 1)) == {at(seen) for seen in window}
      visible = range(row.entry_begin[2][0, s], row.entry_end[2][0, s])
      seen = [tuple(c) for c in row.entry_slots[2][0, visible.start : visible.stop] if c[0] >= 0]
      assert seen == [tuple(map(at, groups[g])) for g in range((name[2] + 1) // 2)]
    first_slot = number
    for start, window, position in decoder:
      assert row.decoder_slots[0, number] == at(start)
      first = max(row.decoder_segment_start[0, number], number - W + 1)
      assert set(range(first, number + 1)) == {first_slot + seen for seen in window}
      visible = range(row.decoder_entry_begin[1][0, number], row.decoder_entry_end[1][0, number])
      cells = row.entry_slots[1][0, visible.start : visible.stop, 0]
      assert cells[cells >= 0].tolist() == [at(("read", 0, p)) for p in range(position + 1)]
      number += 1
  assert number == sum(decoder_slots_of(own, W) for own in turns)
  assert np.all(row.decoder_slots[0, number:] == PADDING) and not row.weights[0, number:].any()
  assert np.all(row.decoder_segment_start[0, number:] > np.arange(number, 150))


def test_pool_blocks_behind_a_hit_hold_the_entries_that_they_hold_in_a_server():
  """Hits and window are multiples of a block, so copies leave whole blocks empty."""
  block = 2
  row = build_turns(documents((3, 20)), [[], [(18, 20)]], [[], [12]], slots=32, hit_multiple=block)
  cells = row.entry_slots[1][0, :, 0]
  begin, end = row.entry_begin[1][0, 25], row.entry_end[1][0, 26]
  for e in range(begin, end):
    if cells[e] >= 0:
      shift = W // block if e - begin > 12 else 0
      assert (e - begin) // block == row.positions[0, cells[e]] // block + shift


def test_only_tokens_of_responses_are_learned_and_each_in_its_own_turn():
  tokens = np.arange(20, dtype=np.int32)
  loss = np.zeros(20, np.float32)
  loss[[5, 7, 8, 14]] = (1, 0.5, 1, 1)
  document, turns = Document(tokens, loss=loss), [[(5, 9), (12, 16)]]
  exact = build_layout([document], slots=24, ratios=(1,))
  assert dict(zip(exact.targets[0], exact.weights[0], strict=True)) | {0: 0} == {
    token: loss[token] for token in tokens
  }
  row = build_turns([document], turns, ratios=(1,))
  learned = [(t, w) for t, w in zip(row.targets[0], row.weights[0], strict=True) if w]
  assert learned == [(5, 1), (7, 0.5), (8, 1), (14, 1)]  # token 8 is before the second response too


def test_copies_have_the_hashed_rows_and_the_modality_of_their_originals():
  primes = hash_primes(1, 2, 11)
  cfg = EngramConfig(
    layers=(1,), table_rows=(sum(primes[0]),), max_ngram=3, heads=1, prime_start=11,
    compressed_vocab=64,
  )  # fmt: skip
  hashing = NgramHash(cfg, np.arange(64, dtype=np.int32))
  modality = np.full(10, TEXT, np.int32)
  modality[2:4] = IMAGE
  document = Document(np.arange(10, 20, dtype=np.int32), modality=modality)
  row = build_layout(
    [document], [[(8, 10)]], [[5]], slots=16, ratios=(1,), hashing=hashing,
    replay=Replay(window=W, decoder_slots=T),
  )  # fmt: skip
  np.testing.assert_array_equal(row.engram_rows[0, 5:9], row.engram_rows[0, 1:5])
  np.testing.assert_array_equal(row.modality[0, 5:9], row.modality[0, 1:5])


def test_turns_without_hits_leave_the_encoder_as_it_is():
  plain, row = (
    build_layout(documents((20,)), slots=24, ratios=(1, 2)),
    build_turns(documents((20,)), [[(9, 12)]]),
  )
  for name in ("tokens", "positions", "document", "is_copy", "segment_start", "engram_rows"):
    np.testing.assert_array_equal(getattr(row, name), getattr(plain, name), err_msg=name)
  for name in ("entry_slots", "entry_begin", "entry_end"):
    for m in (1, 2):
      np.testing.assert_array_equal(getattr(row, name)[m], getattr(plain, name)[m], err_msg=name)
  assert row.decoder_slots.shape == (1, T)


@pytest.mark.parametrize(
  ("turns", "cuts", "options", "sentence"),
  [
    ([(8, 10)], [4], {}, "a hit of 4 tokens is no longer than the window (4)"),
    ([(8, 10)], [8], {}, "a hit of 8 tokens leaves nothing to read before the response at 8"),
    ([(8, 10), (15, 18)], [0, 9], {}, "turn 1: a hit of 9 tokens ends inside what the turn before"),
    ([(12, 14)], [7], {"hit_multiple": 2}, "a hit of 7 tokens is not a multiple of 2"),
    ([(12, 14)], [0], {"hit_multiple": 3}, "it must be a multiple of hit_multiple (3)"),
    ([(12, 14)], [0], {"window": 1}, "at least the largest of the ratios (1, 2)"),
    ([(12, 14)], [], {}, "document 0 has 1 turns, but 0 hits."),
    ([(0, 3)], [0], {}, "the response spans tokens 0 to 2; accepted are spans from 1 to 19"),
    ([(8, 12), (11, 14)], [0, 0], {}, "turn 1: the response spans tokens 11 to 13; accepted"),
    ([(8, 21)], [0], {}, "the response spans tokens 8 to 20"),
    ([(8, 20)], [0], {"decoder_slots": 15}, "take 16 decoder slots, the row has 15."),
    ([(10, 12)], [9], {"slots": 22}, "document 0 needs slots 0 to 23, the row has 22."),
  ],
)
def test_turns_and_hits_that_no_server_meets_are_refused(turns, cuts, options, sentence):
  with pytest.raises(ValueError, match=re.escape(sentence)):
    build_turns(documents((20,)), [turns], [cuts], **options)


def test_a_hit_inside_an_earlier_response_is_fine_where_that_response_is_context():
  row = build_turns(documents((20,)), [[(15, 18)]], [[9]])  # token 9 was of a response
  assert row.is_copy.sum() == W


def test_turns_need_replay_and_replay_needs_turns_and_all_problems_come_at_once():
  with pytest.raises(ValueError, match="belong together"):
    build_layout(documents((5,)), [[]], slots=8, ratios=())
  with pytest.raises(ValueError, match="belong together, and cuts to both"):
    build_layout(documents((5,)), None, [[3]], slots=8, ratios=())
  with pytest.raises(ValueError, match="2 documents need as many lists"):
    build_turns(documents((5, 5)), [[(2, 3)]])
  with pytest.raises(ValueError, match="turn 0: a hit of 3 .*\n.*turn 1: a hit of 19 "):
    build_turns(documents((20,)), [[(8, 10), (15, 18)]], [[3, 19]])
