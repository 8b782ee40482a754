"""Engram's hash against a slow version in Python integers, and the constants of the release."""

import dataclasses

import numpy as np
import pytest

from deepseek_jax.config import EngramConfig
from deepseek_jax.ngram import NgramHash, hash_multipliers, hash_primes

RELEASE = EngramConfig()
SMALL = dataclasses.replace(
  RELEASE, layers=(1, 4), max_ngram=4, heads=2, prime_start=30, compressed_vocab=50,
  table_rows=tuple(sum(p) for p in hash_primes(2, 6, 30)),
)  # fmt: skip


def slow_rows(tokens, is_image, cfg, compressed_id):
  """model.md section 2.8.3 with Python's unbounded integers."""
  pad = int(compressed_id[cfg.pad_token])
  primes = hash_primes(len(cfg.layers), cfg.lookups, cfg.prime_start)
  out = []
  for t in range(len(tokens)):
    classes, blocked = [], False
    for back in range(cfg.max_ngram):
      blocked = blocked or t - back < 0 or bool(is_image[t - back])
      classes.append(pad if blocked else int(compressed_id[tokens[t - back]]))
    of_token = []
    for table, layer in enumerate(cfg.layers):
      multipliers = [int(m) for m in hash_multipliers(layer, cfg)]
      mixed, offset, ids = classes[0] * multipliers[0], 0, []
      for order in range(2, cfg.max_ngram + 1):
        mixed ^= classes[order - 1] * multipliers[order - 1]
        for prime in primes[table][(order - 2) * cfg.heads : (order - 1) * cfg.heads]:
          ids.append(mixed % prime + offset)
          offset += prime
      of_token.append(ids)
    out.append(of_token)
  return np.array(out)


@pytest.mark.parametrize("cfg", [SMALL, RELEASE], ids=["small", "release"])
def test_rows_are_those_of_the_slow_version_with_image_tokens_between(cfg):
  rng = np.random.default_rng(0)
  compressed_id = rng.integers(0, cfg.compressed_vocab, 500).astype(np.int32)
  tokens = rng.integers(0, 500, 40).astype(np.int32)
  is_image = rng.uniform(size=40) < 0.2
  rows = NgramHash(cfg, compressed_id).rows(tokens, is_image)
  assert rows.dtype == np.int32 and rows.min() >= 0
  assert np.all(rows.max(axis=(0, 2)) < cfg.table_rows)
  np.testing.assert_array_equal(rows, slow_rows(tokens, is_image, cfg, compressed_id))


def test_rows_of_a_token_depend_on_it_and_the_tokens_before_it_alone():
  hashing = NgramHash(SMALL, np.arange(50, dtype=np.int32))
  tokens = np.random.default_rng(1).integers(0, 50, 12)
  changed = tokens.copy()
  changed[6] = (changed[6] + 1) % 50
  differs_L = np.any(hashing.rows(tokens) != hashing.rows(changed), axis=(1, 2))
  np.testing.assert_array_equal(np.nonzero(differs_L)[0], [6, 7, 8, 9])


def test_nothing_is_looked_up_across_an_image_token():
  hashing = NgramHash(SMALL, np.arange(50, dtype=np.int32))
  tokens = np.arange(3, 13)
  is_image = np.arange(10) == 4
  other = np.where(np.arange(10) < 4, 40, tokens)
  rows, others = (hashing.rows(t, is_image) for t in (tokens, other))
  np.testing.assert_array_equal(rows[5:], others[5:])
  alone = hashing.rows(tokens[5:])
  np.testing.assert_array_equal(rows[5:], alone)


def test_primes_and_table_sizes_are_the_release_s():
  # model.md section 2.8.2
  first, second = NgramHash(RELEASE, np.zeros(3, np.int32)).primes
  assert first[:8] == (
    16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183
  )  # fmt: skip
  assert first[8:16] == (
    16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321
  )  # fmt: skip
  assert first[-1] == 16000463 and second[0] == 16000477 and second[-1] == 16000889
  assert len(set(first + second)) == 48
  assert (sum(first), sum(second)) == (384006168, 384016682)


@pytest.mark.parametrize(
  ("layer", "multipliers"),
  [
    (1, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
    (14, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
  ],
)
def test_multipliers_are_the_release_s(layer, multipliers):
  assert hash_multipliers(layer, RELEASE).tolist() == multipliers


def test_products_of_the_largest_class_stay_below_two_to_the_63():
  for layer in RELEASE.layers:
    largest = (RELEASE.compressed_vocab - 1) * int(hash_multipliers(layer, RELEASE).max())
    assert largest < 2**63


def test_tables_of_the_wrong_size_are_refused_in_one_sentence():
  wrong = dataclasses.replace(SMALL, table_rows=(100, 200))
  with pytest.raises(ValueError, match=r"^engram.table_rows is \(100, 200\), but .* add up to \("):
    NgramHash(wrong, np.arange(50, dtype=np.int32))


def test_a_map_with_more_classes_than_the_table_expects_is_refused_in_one_sentence():
  with pytest.raises(ValueError, match=r"^engram.compressed_vocab is 50, but .* has 51 classes.$"):
    NgramHash(SMALL, np.arange(51, dtype=np.int32))
