"""The backbone on new tokens behind a cache: encoder layers, decoder layers, or both.

Legend: B sequences, C new slots, T decoder slots, L Engram tables, R table rows of a token, c
streams, D width, V vocabulary, G tokens that an n-gram reaches back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.model import Model
from deepseek_jax.nn.block import Block
from deepseek_jax.sampling.attend import attend
from deepseek_jax.sampling.cache import Cache, LayerMemory
from deepseek_jax.sampling.memory import Pass, new_pass, put_entries, take
from deepseek_jax.sampling.row_formats import RowFormats, row_formats
from deepseek_jax.types import LayerCarry


class Reached(NamedTuple):
  """Slots at the decoder's door: what the first decoder layer starts from."""

  streams_BTcD: jax.Array
  x_BTD: jax.Array  # its attention's input
  engram_rows_BTLR: jax.Array  # int32


class CachedModel(Model):
  """The Model with the same parameters, on tokens that follow those of a cache.

  cfg is from `decoding_config`. Without a decoder every layer counts as decoder.
  """

  packed: bool = True

  def encode(
    self,
    cache: Cache,
    tokens_BC: jax.Array,
    engram_rows_BCLR: jax.Array,
    count_B: jax.Array,
    *,
    write: bool = True,
  ) -> tuple[Cache, Reached]:
    """Encoder layers on new tokens, and the decoder's entries of all of them.

    Args:
      tokens_BC: int32; of each sequence the first count_B are tokens.
      engram_rows_BCLR: int32, of these tokens behind cache.recent.
      write: False leaves entries as they are, see put_entries.
    """
    here = new_pass(self.cfg, cache.position, count_B, cache.encoder_start, engram_rows_BCLR)
    blocks, start, memories = self._blocks(), self._start(), list(cache.layers)
    carry = self.begin(tokens_BC)
    for block in blocks[:start]:
      entered = block.enter(carry, here.slots)
      carry = self._layer(block, *entered, here, memories, carry, write=write)
    door = blocks[start]
    streams, x_BCD = door.enter(carry, here.slots)
    self._remember(door, x_BCD, here, memories, write)
    recent_BX = jnp.concatenate([cache.recent, tokens_BC], axis=1)
    last_BG = count_B[:, None] + jnp.arange(cache.recent.shape[1])
    cache = cache._replace(
      layers=tuple(memories),
      position=cache.position + count_B,
      recent=take(recent_BX, last_BG),
    )
    return cache, Reached(streams, x_BCD, engram_rows_BCLR)

  def decode(
    self,
    cache: Cache,
    reached: Reached,
    first_B: jax.Array,
    count_B: jax.Array,
    *,
    write: bool = True,
  ) -> tuple[Cache, jax.Array]:
    """Decoder layers on slots from position first_B on: hidden states [B, T, D], float32."""
    rows_BTLR = reached.engram_rows_BTLR
    here = new_pass(self.cfg, first_B, count_B, cache.decoder_start, rows_BTLR)
    blocks, start, memories = self._blocks(), self._start(), list(cache.layers)
    carry = LayerCarry._make(None for _ in LayerCarry._fields)
    entered = reached.streams_BTcD, reached.x_BTD
    carry = self._layer(blocks[start], *entered, here, memories, carry, entries_there=True)
    for block in blocks[start + 1 :]:
      entered = block.enter(carry, here.slots)
      carry = self._layer(block, *entered, here, memories, carry, write=write)
    return cache._replace(layers=tuple(memories)), self.finish(carry)

  def _blocks(self) -> list[Block]:
    return [block for group in self.groups for block in group]

  def _start(self) -> int:
    return self.cfg.decoder_start or 0

  def _formats(self) -> RowFormats:
    return row_formats(self.cfg, packed=self.packed)

  def _layer(
    self,
    block: Block,
    streams: jax.Array,
    x_BCD: jax.Array,
    here: Pass,
    memories: list[LayerMemory],
    carry: LayerCarry,
    *,
    write: bool = True,
    entries_there: bool = False,
  ) -> LayerCarry:
    """The rest of a layer; its memory in `memories` is replaced."""
    spec = block.spec
    if not entries_there:
      self._remember(block, x_BCD, here, memories, write)
    source = None if spec.kv_source is None else memories[spec.kv_source]
    y_BCD, memories[spec.layer], carry = attend(
      block.attn, self._formats(), x_BCD, here, memories[spec.layer], source, carry
    )
    return block.leave(streams, y_BCD, here.slots, carry, jnp.zeros(()))[0]

  def _remember(self, block: Block, x_BCD, here: Pass, memories, write: bool) -> None:
    if block.spec.kind == "full":
      number = block.spec.layer
      memories[number] = put_entries(
        block.attn, self._formats(), memories[number], x_BCD, here, write=write
      )
