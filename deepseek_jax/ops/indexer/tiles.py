"""How much of the indexer's work is done at a time, and which path is taken; with the reasons.

Times are estimates for 32 heads x 128 channels, on one H200 from its measured peaks (790 TFLOP/s,
about 4.5 TB/s from L2), unless a line says "measured".
"""

import dataclasses

# Scores of a chunk of queries are written out before the best are taken: float32 [B, C, N].
SCORE_BYTES = 2**28
# Products [B, C, I, part of N] and gathered keys [B, C, members, i] of the plain-JAX paths.
PRODUCT_BYTES = 2**28
# Queries of a chunk: beyond this many a chunk gains nothing, below it kernels have idle processors.
MOST_QUERIES, FEWEST_QUERIES = 4096, 64

# Places that one program of the choosing kernel looks at. 8192 values are 16 registers of each of
# 512 threads; a longer row first chooses blocks by their maxima.
DIRECT_PLACES, MOST_PLACES = 8192, 32768

# Gathered keys, rows of their gradient and products with all heads that exist at a time in the
# divergence, the largest of them in float32: 1,024 queries with 512 choices of 128 channels.
DIVERGENCE_BYTES = 2**28

# A restricted layer may score its pool's members alone, or score every visible entry and then look
# at the members. Members are gathered rows, bound by L2 (GPU) or by small copies (TPU); a scan is
# bound by the matrix units but grows with the context. The members win from this many entries per
# pool member on:
#   pallas_gpu  measured for 65,536 queries of 65,536 entries: members 49.9 ms, all of them and then
#               the members 75.8 ms; a scan grows with N: equal at N = 43,000, 2.6 per member.
#   xla         measured on the H200 as above: 620 ms and 769 ms, equal at 3.2 per member.
#   pallas_tpu  rows gathered at 0.5 TB/s take 8.4 us, a causal scan at 284 TFLOP/s N x 14 ps.
MEMBERS_FIRST = {"pallas_gpu": 2.6, "xla": 3.2, "pallas_tpu": 36}


def query_chunk(bytes_per_query: int, limit: int) -> int:
  """Queries at a time so that they take at most `limit` bytes, a power of two in the bounds."""
  fits = max(1, limit // max(1, bytes_per_query))
  return min(MOST_QUERIES, max(FEWEST_QUERIES, 1 << (fits.bit_length() - 1)))


def scores_members(implementation: str, entries: int, members: int) -> bool:
  """Whether a restricted layer scores its pool's members alone rather than every entry."""
  return entries > MEMBERS_FIRST[implementation] * members


def block_size(places: int, count: int) -> int:
  """Entries of the blocks by whose maxima a row of `places` is narrowed; 1 for none.

  The `count` best blocks hold the `count` best entries. Both rounds, places / size blocks and
  count * size entries, should fit one program.
  """
  if places <= DIRECT_PLACES:
    return 1
  size = 2
  while places > size * DIRECT_PLACES and 2 * size * count <= DIRECT_PLACES:
    size *= 2
  return size


def choose_warps(places: int) -> int:
  """Warps of a program that chooses among `places`: 16 values a thread, up to 512 threads."""
  return max(1, min(16, places // 512))


@dataclasses.dataclass(frozen=True)
class ScoreTile:
  """What one program of a score kernel computes, and with what."""

  queries: int
  keys: int
  warps: int
  stages: int


# Measured, all 65,536 entries visible: 495 TFLOP/s; 3 stages 478, 4 stages 451, 64 x 256 keys 396,
# 128 x 128 364, 128 x 64 398, 128 x 256 280.
SCORE_TILE = ScoreTile(queries=64, keys=128, warps=4, stages=2)
# A decoding step has one query: 16 are the fewest that a matrix unit takes. Not measured.
FEW_QUERIES_TILE = ScoreTile(queries=16, keys=128, warps=4, stages=2)
MEMBER_TILE = ScoreTile(queries=1, keys=128, warps=4, stages=3)


def score_tile(queries: int) -> ScoreTile:
  """For so many queries of each row."""
  return FEW_QUERIES_TILE if queries <= FEW_QUERIES_TILE.queries else SCORE_TILE
