"""Reading and writing a layer's memory. A pass works on C new slots of each of B sequences.

Legend: W window, N entry cells, E cells that a pass may fill, m ratio, D width, d head width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn.attention import Attention
from deepseek_jax.ops.table_lookup import take_own
from deepseek_jax.sampling.cache import LayerMemory
from deepseek_jax.sampling.row_formats import RowFormats, Stored
from deepseek_jax.sharding import constrain
from deepseek_jax.types import Entries, Slots


class Pass(NamedTuple):
  """New slots: of each sequence the first `count`, at positions from `first` on."""

  first_B: jax.Array  # int32
  count_B: jax.Array  # int32; the slots behind them see nothing and leave nothing
  window_start_B: jax.Array  # int32 first position that a window may reach
  slots: Slots  # segment_start counts key rows: W - 1 rows from before, then the slots


def new_pass(cfg: ModelConfig, first_B, count_B, window_start_B, engram_rows_BCLR) -> Pass:
  """The slots of text tokens; C is that of engram_rows_BCLR."""
  length, before = engram_rows_BCLR.shape[1], cfg.attention.window - 1
  offset_C = jnp.arange(length, dtype=jnp.int32)
  positions_BC = first_B[:, None] + offset_C
  counts_BC = offset_C < count_B[:, None]
  start_BC = jnp.maximum(window_start_B - first_B + before, 0)[:, None]
  end = lambda m: jnp.where(counts_BC, (positions_BC + 1) // m, 0)
  slots = Slots(
    positions_BQ=positions_BC,
    is_vision_BQ=jnp.zeros_like(counts_BC),
    counts_BQ=counts_BC,
    segment_start_BQ=jnp.where(counts_BC, start_BC, before + length),
    entry_begin_BQ={m: jnp.zeros_like(positions_BC) for m in cfg.ratios},
    entry_end_BQ={m: end(m) for m in cfg.ratios},
    engram_rows_BQLR=engram_rows_BCLR,
  )
  return Pass(first_B, count_B, window_start_B, slots)


def whole(tree: Any) -> Any:
  """Arrays [B, ...] cut along B alone on a mesh: what is read by number lies on one device.

  Left to itself XLA's partitioner (jax 0.11.2) cuts slots as well, and crashes on their gathers.
  """
  return jax.tree.map(lambda x_B: constrain(x_B, "batch", *(None,) * (x_B.ndim - 1)), tree)


def take(stored: Any, ids_BX: jax.Array) -> Any:
  """Rows by number of every array [B, N, ...], as they lie; -1 reads row 0, to be masked."""
  ids_BX = whole(ids_BX)
  return jax.tree.map(lambda x_BN: whole(take_own(whole(x_BN), ids_BX)), stored)


def put(stored: Stored, ids_BX: jax.Array, new: Stored, keep_BX: jax.Array) -> Stored:
  """The rows with new ones at the numbers that are kept."""

  def one(x_BN, new_BX):
    at_BX = jnp.where(keep_BX, ids_BX, x_BN.shape[1])  # one past the end is dropped
    row_B1 = jnp.arange(len(at_BX))[:, None]
    return whole(x_BN.at[row_B1, at_BX].set(new_BX, mode="drop"))

  return jax.tree.map(one, whole(stored), whole(new))


def window_before(window: Stored, here: Pass) -> Stored:
  """The W - 1 rows before the first new slot, oldest first; what is too old is hidden by Pass."""
  size = window[0].shape[1]
  return take(window, jnp.mod(here.first_B[:, None] - (size - 1) + jnp.arange(size - 1), size))


def put_window(window: Stored, here: Pass, new: Stored) -> Stored:
  """The window after the new slots, of which the last W stay."""
  size, length = window[0].shape[1], new[0].shape[1]
  offset_C = jnp.arange(length)
  stays_BC = (offset_C < here.count_B[:, None]) & (offset_C >= here.count_B[:, None] - size)
  return put(window, jnp.mod(here.first_B[:, None] + offset_C, size), new, stays_BC)


def put_entries(
  attention: Attention,
  formats: RowFormats,
  memory: LayerMemory,
  x_BCD: jax.Array,
  here: Pass,
  *,
  write: bool = True,
) -> LayerMemory:
  """The memory of a KV source with the entries that the new slots complete.

  A group that they leave unfinished stays behind as rows of the compressor (model.md 2.5).

  Args:
    x_BCD: the attention's input.
    write: False leaves entries as they are: tokens that are there already go through again.
  """
  m, first_B1 = attention.spec.ratio, here.first_B[:, None]
  ids_BE = first_B1 // m + jnp.arange(-(-x_BCD.shape[1] // m))
  exists_BE = (ids_BE + 1) * m <= first_B1 + here.count_B[:, None]
  # Rows count m - 1 pending tokens, then the slots.
  row_BEm = ids_BE[..., None] * m + jnp.arange(m) - first_B1[..., None] + (m - 1)
  entries = Entries(jnp.where(exists_BE[..., None], row_BEm, -1), ids_BE * m, exists_BE)
  compressor = attention.compressor
  if m == 1:
    latent_BEd = compressor(x_BCD, entries)
  else:
    pairs = zip(memory.pending, compressor.rows(x_BCD), strict=True)
    a_BXd, z_BXd = (jnp.concatenate(whole(pair), axis=1) for pair in pairs)
    latent_BEd = compressor.merge(a_BXd, z_BXd, entries, x_BCD.dtype)
    last_BX = here.count_B[:, None] + jnp.arange(m - 1)
    memory = memory._replace(pending=take((a_BXd, z_BXd), last_BX))
  kv_BEd, keys_BEi = attention.entries(latent_BEd, entries)
  kv, keys = formats.main.write(kv_BEd), formats.index.write(keys_BEi)
  attention.tap("attn.compressed_kv", formats.main.read(kv))
  attention.tap("indexer.k", formats.index.read(keys))
  if not write:
    return memory
  return memory._replace(
    entries=put(memory.entries, ids_BE, kv, exists_BE),
    keys=put(memory.keys, ids_BE, keys, exists_BE),
  )
