"""Engram row ids: hashed n-grams of compressed token ids, in NumPy and int64, on the host.

Legend: L tokens of one document, T Engram tables, R rows read by a token from one table.
"""

import dataclasses
import functools
import math

import numpy as np

from deepseek_jax.config import EngramConfig

SEED = 10007  # the generator of table t's multipliers is seeded with SEED * layer (model.md 2.8.2)


def _is_prime(number: int) -> bool:
  return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


@functools.cache
def hash_primes(tables: int, per_table: int, start: int) -> tuple[tuple[int, ...], ...]:
  """The first tables * per_table distinct primes >= start, in order, split by table."""
  primes, candidate = [], start
  while len(primes) < tables * per_table:
    if _is_prime(candidate):
      primes.append(candidate)
    candidate += 1
  return tuple(tuple(primes[t * per_table : (t + 1) * per_table]) for t in range(tables))


def hash_multipliers(layer: int, cfg: EngramConfig) -> np.ndarray:
  """[max_ngram] odd int64 multipliers of the table read before `layer`."""
  bound = max(1, ((2**63 - 1) // cfg.compressed_vocab) // 2)
  generator = np.random.default_rng(SEED * layer)
  return generator.integers(0, bound, size=cfg.max_ngram, dtype=np.int64) * 2 + 1


@dataclasses.dataclass(frozen=True)
class NgramHash:
  """Maps the tokens of a document to the table rows that each token reads.

  Row of order n and head h at token t, with c_s the compressed id s tokens back:
    (c_0 m_0 ^ ... ^ c_{n-1} m_{n-1}) mod prime[n, h] + offset[n, h]
  A look-back past the document's start or onto an image token, and all longer ones, read the pad
  class. Rows of all padding are -1, which the layout writes. Source: model.md section 2.8.3.
  """

  cfg: EngramConfig
  compressed_id: np.ndarray  # [V] int32, token id -> class

  def __post_init__(self):
    rows = tuple(sum(primes) for primes in self.primes)
    if rows != self.cfg.table_rows:
      raise ValueError(
        f"engram.table_rows is {self.cfg.table_rows}, but the primes from "
        f"{self.cfg.prime_start} on add up to {rows}."
      )
    if len(self.compressed_id) and self.compressed_id.max() >= self.cfg.compressed_vocab:
      raise ValueError(
        f"engram.compressed_vocab is {self.cfg.compressed_vocab}, but the tokenizer's map has "
        f"{int(self.compressed_id.max()) + 1} classes."
      )

  @property
  def primes(self) -> tuple[tuple[int, ...], ...]:
    return hash_primes(len(self.cfg.layers), self.cfg.lookups, self.cfg.prime_start)

  def rows(self, tokens_L: np.ndarray, is_image_L: np.ndarray | None = None) -> np.ndarray:
    """[L, T, R] int32 row ids of one document (offsets inside the table included)."""
    cfg, length = self.cfg, len(tokens_L)
    pad = int(self.compressed_id[cfg.pad_token])
    class_L = self.compressed_id[tokens_L].astype(np.int64)
    live_L = np.ones(length, bool) if is_image_L is None else ~is_image_L
    shifted, alive_L = [], np.ones(length, bool)
    for shift in range(cfg.max_ngram):
      back = np.arange(length) - shift
      alive_L = alive_L & (back >= 0) & live_L[np.maximum(back, 0)]
      shifted.append(np.where(alive_L, class_L[np.maximum(back, 0)], pad))
    out = np.empty((length, len(cfg.layers), cfg.lookups), np.int32)
    for table, layer in enumerate(cfg.layers):
      multipliers, primes = hash_multipliers(layer, cfg), self.primes[table]
      offsets = np.concatenate([[0], np.cumsum(primes)[:-1]])
      mixed = shifted[0] * multipliers[0]
      for order in range(2, cfg.max_ngram + 1):
        mixed = mixed ^ (shifted[order - 1] * multipliers[order - 1])
        first = (order - 2) * cfg.heads
        for column in range(first, first + cfg.heads):
          out[:, table, column] = mixed % primes[column] + offsets[column]
    return out
