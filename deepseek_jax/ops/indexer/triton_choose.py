"""Exact top-k of rows without a sort: bisection for the k-th value, then a prefix sum for places.

A program holds a row's values in registers. It finds the k-th largest by counting how many lie
above a threshold; what lies above it is chosen, and of the values equal to it those with the
lowest ids. The rank of a chosen id is a prefix sum, so ids come out ascending. A long row first
chooses the k blocks with the best maxima (ties: the lowest block), and then among their entries:
any entry outside of them has k better ones, one in each chosen block.

Legend: R rows, N values of a row, V candidates of a program, G blocks of a row, K chosen.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from deepseek_jax.ops.indexer import tiles
from deepseek_jax.ops.triton_call import triton_call

_BLOCKS_PER_PROGRAM = 1024  # of the maxima kernel; a program reads this many blocks at once
_FEWEST_PLACES = 32  # one warp
# Minus infinity as an integer that orders like the float: nothing that may be chosen is below.
_LOWEST = -0x7F800001


def top_ids(values_RN: jax.Array, begin_R: jax.Array, end_R: jax.Array, count: int) -> jax.Array:
  """Ids in [begin, end) of the `count` best values above minus infinity, the lowest first if equal.

  Args:
    values_RN: float32 without NaN; values outside of the ranges may be anything.
    begin_R, end_R: int32.
    count: at most tiles.MOST_PLACES, less for rows longer than that.

  Returns: int32 [R, count], ascending, -1 at the end.
  Raises: NotImplementedError where no program could hold the candidates.
  """
  size = tiles.block_size(values_RN.shape[1], count)
  if size == 1:
    return _choose(values_RN, begin_R, end_R, None, count=count, block=1)
  maxima_RG = block_maxima(values_RN, begin_R, end_R, block=size)
  blocks_RK = top_ids(maxima_RG, jnp.zeros_like(begin_R), block_count(begin_R, end_R, size), count)
  return members(values_RN, begin_R, end_R, blocks_RK, block=size, count=count)


def members(values_RN, begin_R, end_R, blocks_RG, *, block: int, count: int) -> jax.Array:
  """As top_ids, of the entries begin + g * block ... of listed blocks g (ascending, -1 last)."""
  return _choose(values_RN, begin_R, end_R, blocks_RG, count=count, block=block)


def block_count(begin_R, end_R, block: int):
  return jnp.maximum(end_R - begin_R + block - 1, 0) // block


def block_maxima(values_RN, begin_R, end_R, *, block: int, pin_newest: bool = False) -> jax.Array:
  """Best value of each block of `block` entries, counted from begin.

  Args:
    values_RN, begin_R, end_R: as for top_ids.
    block: entries in a block, a power of two.
    pin_newest: the block that holds the last entry gets plus infinity.

  Returns: float32 [R, ceil(N / block)]; blocks behind the last entry are undefined.
  """
  rows, size = values_RN.shape
  blocks = -(-size // block)
  part = min(_BLOCKS_PER_PROGRAM, pl.next_power_of_2(blocks))
  [maxima_RG] = triton_call(
    functools.partial(_block_maxima, part=part, block=block, pin_newest=pin_newest),
    (values_RN, begin_R, end_R),
    [jax.ShapeDtypeStruct((rows, blocks), jnp.float32)],
    (rows, -(-blocks // part)),
    num_warps=4,
  )
  return maxima_RG


def _block_maxima(values_ref, begin_ref, end_ref, maxima_ref, *, part, block, pin_newest):
  row, first = pl.program_id(0), pl.program_id(1) * part
  begin, end = begin_ref[row], end_ref[row]

  @pl.when(begin + first * block < end)
  def _():
    number_G = first + jnp.arange(part)
    entry_GV = begin + number_G[:, None] * block + jnp.arange(block)[None]
    value_GV = plt.load(values_ref.at[row, entry_GV], mask=entry_GV < end, other=-jnp.inf)
    best_G = jnp.max(value_GV, axis=1)
    if pin_newest:
      best_G = jnp.where(number_G == (end - begin - 1) >> (block.bit_length() - 1), jnp.inf, best_G)
    plt.store(maxima_ref.at[row, number_G], best_G, mask=number_G < maxima_ref.shape[1])


def _choose(values_RN, begin_R, end_R, blocks_RG, *, count: int, block: int) -> jax.Array:
  rows = values_RN.shape[0]
  candidates = values_RN.shape[1] if blocks_RG is None else blocks_RG.shape[1] * block
  places = pl.next_power_of_2(max(candidates, _FEWEST_PLACES))
  if places > tiles.MOST_PLACES:
    raise NotImplementedError(
      f"choosing {count} of {candidates} candidates needs {places} places in one program, "
      f"there are {tiles.MOST_PLACES}"
    )
  lists = () if blocks_RG is None else (blocks_RG,)
  [ids_RK] = triton_call(
    functools.partial(_choose_row, places=places, block=block, count=count),
    (values_RN, begin_R, end_R, *lists),
    [jax.ShapeDtypeStruct((rows, count), jnp.int32)],
    (rows,),
    num_warps=tiles.choose_warps(places),
  )
  return ids_RK


def _choose_row(values_ref, begin_ref, end_ref, *refs, places, block, count):
  *lists, ids_ref = refs
  row, place_V = pl.program_id(0), jnp.arange(places)
  begin, end = begin_ref[row], end_ref[row]
  if lists:
    listed_V = place_V >> (block.bit_length() - 1)
    number_V = plt.load(lists[0].at[row, listed_V], mask=listed_V < lists[0].shape[1], other=-1)
    id_V = begin + number_V * block + (place_V & (block - 1))
    live_V = (number_V >= 0) & (id_V < end)
  else:
    id_V = begin + place_V
    live_V = id_V < end
  value_V = plt.load(values_ref.at[row, jnp.where(live_V, id_V, 0)], mask=live_V, other=-jnp.inf)
  order_V = _ordered(value_V)
  threshold, equal_wanted = _kth_largest(order_V, count)

  above_V = order_V > threshold
  equal_V = (order_V == threshold) & (order_V > _LOWEST)
  # Two prefix sums in one: at most 2^15 candidates, so a count fits the lower half.
  both_V = jnp.where(above_V, 1, 0) + jnp.where(equal_V, 1 << 16, 0)
  before_V = jnp.cumsum(both_V) - both_V
  equal_before_V = before_V >> 16
  rank_V = (before_V & 0xFFFF) + jnp.minimum(equal_before_V, equal_wanted)
  chosen_V = above_V | (equal_V & (equal_before_V < equal_wanted))
  # Others point past the row: the interpreter writes masked places too, and drops those.
  plt.store(ids_ref.at[row, jnp.where(chosen_V, rank_V, count + place_V)], id_V, mask=chosen_V)

  total = jnp.sum(jnp.where(chosen_V, 1, 0))
  rank_K = jnp.arange(pl.next_power_of_2(count))
  empty_K = (rank_K >= total) & (rank_K < count)
  plt.store(ids_ref.at[row, rank_K], jnp.full_like(rank_K, -1), mask=empty_K)


def _ordered(value):
  """float32 -> int32 with the same order, and back: an involution on the bits."""
  bits = jax.lax.bitcast_convert_type(value, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(order):
  bits = jnp.where(order < 0, order ^ 0x7FFFFFFF, order)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _kth_largest(order_V, count: int):
  """(t, e): all above t are chosen, and e of those equal to t.

  count_above(low) >= count > count_above(high) narrows until they are neighbours, or until exactly
  `count` lie above some threshold. Thresholds halve the values' range and the integers' range in
  turn: the first is fast for scores, the second bounds the steps by 64 for any values.
  """
  live_V = order_V > _LOWEST
  live = jnp.sum(jnp.where(live_V, 1, 0))
  smallest = jnp.min(jnp.where(live_V, order_V, 0x7FFFFFFF)) - 1
  low = jnp.where(live > count, smallest, _LOWEST)
  high = jnp.where(live > count, jnp.max(order_V), _LOWEST)

  def apart(state):
    low, high, _, _ = state
    return low < high - 1

  def narrow(state):
    low, high, above_high, step = state
    by_value = _ordered(_value(low) * 0.5 + _value(high) * 0.5)
    by_value = jnp.minimum(jnp.maximum(by_value, low + 1), high - 1)
    by_order = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
    middle = jnp.where((step & 1) == 0, by_value, by_order)
    above = jnp.sum(jnp.where(order_V > middle, 1, 0))
    low = jnp.where(above >= count, middle, low)
    lowers_high = above <= count
    high = jnp.where(lowers_high, middle, high)
    return low, high, jnp.where(lowers_high, above, above_high), step + 1

  start_above = jnp.where(live > count, 0, live)
  _, threshold, above, _ = jax.lax.while_loop(apart, narrow, (low, high, start_above, 0))
  return threshold, count - above
