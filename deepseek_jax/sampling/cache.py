"""The cache: everything that is needed to go on with a sequence, as one value (model.md 5.3).

Legend: B sequences, W window, N entry cells, m ratio, d head width, G tokens that an n-gram reaches
back.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.config import ModelConfig
from deepseek_jax.sampling.row_formats import RowFormat, Stored, row_formats

NO_TOKEN = -1  # in `recent`: before the sequence's first token


class LayerMemory(NamedTuple):
  """What a layer keeps; None for what it does not have."""

  window: Stored  # [B, W, ...], the row of position p lies at p mod W
  entries: Any  # Stored [B, N, ...] of a KV source
  keys: Any  # Stored [B, N, ...] of its indexer
  pending: Any  # two of float32 [B, m-1, d], the compressor's rows of an unfinished group


class Cache(NamedTuple):
  """Positions are int32 [B]; the windows of encoder and decoder reach back to their starts."""

  layers: tuple[LayerMemory, ...]
  position: jax.Array  # tokens so far
  encoder_start: jax.Array  # first position whose window rows the encoder layers have
  decoder_start: jax.Array
  recent: jax.Array  # int32 [B, G] last token ids, NO_TOKEN before the first


def decoding_config(cfg: ModelConfig, *, packed: bool) -> ModelConfig:
  """The configuration to decode with: a subtree per layer, and all that a packed cache rounds."""
  numerics = cfg.numerics
  if packed:
    numerics = dataclasses.replace(numerics, window_fp8=True, main_fp4=True, indexer_fp4=True)
  return dataclasses.replace(cfg, numerics=numerics, scan_layers=False, remat="none")


def empty_cache(cfg: ModelConfig, *, rows: int, capacity: int, packed: bool) -> Cache:
  """A cache for so many sequences, without a token.

  Args:
    cfg: from `decoding_config`.
    rows: B.
    capacity: tokens that a sequence may come to; a multiple of every ratio.

  Raises: ValueError for another capacity.
  """
  if bad := [m for m in cfg.ratios if capacity % m]:
    raise ValueError(f"capacity is {capacity}, which is not a multiple of the ratios {bad}.")
  formats, width = row_formats(cfg, packed=packed), cfg.attention.head_dim

  def zeros(form: RowFormat, cells: int, channels: int) -> Stored:
    row = jax.ShapeDtypeStruct((rows, cells, channels), cfg.numerics.compute_dtype)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(form.write, row))

  layers = []
  for spec in cfg.schedule():
    memory = LayerMemory(zeros(formats.window, cfg.attention.window, width), None, None, None)
    if spec.kind == "full":
      pending = jnp.zeros((rows, spec.ratio - 1, width), jnp.float32)
      memory = memory._replace(
        entries=zeros(formats.main, capacity // spec.ratio, width),
        keys=zeros(formats.index, capacity // spec.ratio, cfg.indexer.head_dim),
        pending=(pending, pending + 0) if spec.ratio > 1 else None,
      )
    layers.append(memory)
  start = lambda: jnp.zeros((rows,), jnp.int32)  # buffers of their own: they may be donated
  reach = cfg.engram.max_ngram - 1 if cfg.engram.layers else 0
  recent = jnp.full((rows, reach), NO_TOKEN, jnp.int32)
  return Cache(tuple(layers), start(), start(), start(), recent)


def capacity(cfg: ModelConfig, cache: Cache) -> int | None:
  """Tokens that a sequence may come to; None where windows are all that is kept."""
  sources = [s for s in cfg.schedule() if s.kind == "full"]
  return min((s.ratio * cache.layers[s.layer].entries[0].shape[1] for s in sources), default=None)


def bytes_per_token(cfg: ModelConfig, *, capacity: int, packed: bool = True) -> float:
  """Bytes that a token adds to the cache, from the sizes of its arrays; nothing is allocated."""
  cfg = decoding_config(cfg, packed=packed)
  cache = jax.eval_shape(lambda: empty_cache(cfg, rows=1, capacity=capacity, packed=packed))
  growing = [(memory.entries, memory.keys) for memory in cache.layers]
  return sum(_bytes(x) for x in jax.tree.leaves(growing)) / capacity


def _bytes(x: jax.ShapeDtypeStruct) -> int:
  return math.prod(x.shape) * x.dtype.itemsize


def without_windows(cache: Cache) -> Cache:
  """What is left where only entries and indexer keys were kept: the windows hold nothing."""
  empty = lambda tree: jax.tree.map(jnp.zeros_like, tree)
  layers = tuple(m._replace(window=empty(m.window), pending=empty(m.pending)) for m in cache.layers)
  return cache._replace(
    layers=layers,
    encoder_start=cache.position,
    decoder_start=cache.position,
    recent=jnp.full_like(cache.recent, NO_TOKEN),
  )
