"""Attention of new slots to a layer's memory and to one another, through the ops of training.

Legend: B sequences, C new slots, W window, K chosen entries, V members of a pool, H heads, d head
width, D width, r query rank.
"""

import jax
import jax.numpy as jnp

from deepseek_jax.nn.attention import Attention, Projected
from deepseek_jax.ops.indexer import Visible
from deepseek_jax.ops.indexer.xla import member_ids
from deepseek_jax.ops.sparse_attention import sparse_attention
from deepseek_jax.sampling.cache import LayerMemory
from deepseek_jax.sampling.memory import Pass, put_window, take, window_before
from deepseek_jax.sampling.row_formats import RowFormats
from deepseek_jax.types import LayerCarry, no_tap


def attend(
  attention: Attention,
  formats: RowFormats,
  x_BCD: jax.Array,
  here: Pass,
  memory: LayerMemory,
  source: LayerMemory | None,
  carry: LayerCarry,
) -> tuple[jax.Array, LayerMemory, LayerCarry]:
  """Returns the output [B, C, D], the memory with the new window rows, and the new choice.

  Args:
    memory: of this layer, before the new slots.
    source: of the layer whose entries this one reads, with those of the new slots.
  """
  made = attention.project(x_BCD, here.slots)
  new = formats.window.write(made.kv_BQd)
  made = made._replace(kv_BQd=attention.tap("attn.window_kv", formats.window.read(new)))
  if attention.spec.kind in ("full", "reindex"):
    carry = _choose(attention, formats, x_BCD, made, here, source, carry)
  selection = carry.selection_BQK if source is not None else None
  after = memory._replace(window=put_window(memory.window, here, new))
  if x_BCD.shape[1] == 1:
    out_BCHd = _attend_one(attention, formats, made, here, after, source, selection)
  else:
    out_BCHd = _attend_many(attention, formats, made, here, memory, source, selection)
  return attention.output(out_BCHd, here.slots), after, carry


def _choose(attention, formats, x_BCD, made: Projected, here: Pass, source, carry) -> LayerCarry:
  indexer, spec, slots = attention.indexer, attention.spec, here.slots
  q_BCIi, weights_BCI = indexer.queries(x_BCD, made.qr_BQr, slots)
  begin_BC, end_BC = slots.entry_begin_BQ[spec.ratio], slots.entry_end_BQ[spec.ratio]
  restricted = spec.pool == "restrict"
  if restricted and x_BCD.shape[1] == 1 and attention.tap is no_tap:
    block = attention.cfg.indexer.pool_block_size
    ids_BV = member_ids(carry.pool_BQW, begin_BC, end_BC, block)[:, 0]
    keys_BVi = formats.index.read(take(source.keys, ids_BV))
    all_of_them = jnp.full_like(end_BC, ids_BV.shape[1])
    members = Visible(ids_BV >= 0, jnp.zeros_like(begin_BC), all_of_them)
    place_B1K = indexer.choose(q_BCIi, weights_BCI, keys_BVi, members, None).selection_BQK
    ids_B1K = jnp.take_along_axis(ids_BV[:, None], jnp.maximum(place_B1K, 0), axis=-1)
    return carry._replace(selection_BQK=jnp.where(place_B1K >= 0, ids_B1K, -1))
  keys_BNi = formats.index.read(source.keys)
  visible = Visible(jnp.ones(keys_BNi.shape[:2], bool), begin_BC, end_BC)
  pool = carry.pool_BQW if restricted else None
  chosen = indexer.choose(q_BCIi, weights_BCI, keys_BNi, visible, pool)
  carry = carry._replace(selection_BQK=chosen.selection_BQK)
  return carry if chosen.pool_BQW is None else carry._replace(pool_BQW=chosen.pool_BQW)


def _attend_many(attention, formats, made: Projected, here: Pass, memory, source, selection):
  """Rows from before the new slots stand in front of them, with queries that see nothing."""
  window, before = attention.cfg.attention.window, attention.cfg.attention.window - 1
  in_front = lambda x_BC, fill: jnp.pad(
    x_BC, [(0, 0), (before, 0)] + [(0, 0)] * (x_BC.ndim - 2), constant_values=fill
  )
  old_BXd = formats.window.read(window_before(memory.window, here))
  length = here.slots.positions_BQ.shape[1]
  attended = sparse_attention(
    in_front(made.q_BQHd, 0),
    jnp.concatenate([old_BXd, made.kv_BQd], axis=1),
    None if source is None else formats.main.read(source.entries),
    None if source is None else in_front(selection, -1),
    in_front(here.slots.segment_start_BQ, before + length),
    attention.sink,
    window=window,
  )
  return attended.out_BQHd[:, before:]


def _attend_one(attention, formats, made: Projected, here: Pass, memory, source, selection):
  """One query: its window and its chosen entries are gathered, and all of them are its choice."""
  window = attention.cfg.attention.window
  first_B1 = here.first_B[:, None]
  age_BW = jnp.mod(first_B1 - jnp.arange(window), window)  # 0 is the query's own row
  seen_BW = (age_BW > 0) & (first_B1 - age_BW >= here.window_start_B[:, None])
  rows_BXd, seen_BX = formats.window.read(memory.window), seen_BW
  if source is not None:
    taken_BKd = formats.main.read(take(source.entries, selection[:, 0]))
    rows_BXd = jnp.concatenate([rows_BXd, taken_BKd], axis=1)
    seen_BX = jnp.concatenate([seen_BX, selection[:, 0] >= 0], axis=1)
  count = seen_BX.shape[1]
  ids_BX = jnp.sort(jnp.where(seen_BX, jnp.arange(count, dtype=jnp.int32), count), axis=1)
  attended = sparse_attention(
    made.q_BQHd,
    made.kv_BQd,
    rows_BXd,
    jnp.where(ids_BX < count, ids_BX, -1)[:, None],
    jnp.where(here.slots.counts_BQ, 0, 1),  # its own slot, or nothing at all
    attention.sink,
    window=1,
  )
  return attended.out_BQHd
