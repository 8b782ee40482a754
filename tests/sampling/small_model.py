"""One small model with every kind of layer on both sides of the decoder's start, and its forward.

Legend: B sequences, S slots, T decoder slots, V vocabulary, W window.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from flax import linen as nn

from configs import nano
from deepseek_jax.config import ModelConfig, NumericsConfig
from deepseek_jax.layout import Document, Layout, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sampling.sampler import Sampler

B, S = 2, 48
TOLERANCE = 2e-5  # of the largest logit; a step adds up in another order than a forward


def configuration(**numerics) -> ModelConfig:
  """nano with a decoder layer more, which reuses a choice, and an Engram table in the decoder."""
  cfg = ModelConfig.from_dict(nano.get_config().model.to_dict())
  return dataclasses.replace(
    cfg,
    compress_ratios=(0, 2, 2, 1, 1, 1),
    engram=dataclasses.replace(cfg.engram, layers=(1, 4)),
    numerics=NumericsConfig(compute_dtype="float32", **numerics),
    scan_layers=False,
    remat="none",
  )


CFG = configuration(window_fp8=False)
W = CFG.attention.window
HASHING = NgramHash(CFG.engram, np.arange(CFG.vocab, dtype=np.int32))


def random_tokens(seed: int, length: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, CFG.vocab, length).astype(np.int32)


def layout_of(*sequences: np.ndarray) -> Layout:
  """A row for each sequence, all of them with every slot in the decoder."""
  rows = [
    build_layout([Document(tokens)], slots=S, ratios=CFG.ratios, hashing=HASHING)
    for tokens in sequences
  ]
  return stack_layouts(rows)


def with_early_exit(layout: Layout, starts) -> Layout:
  """Decoder slots of each row only from its start on, whose windows reach no further back."""
  kept = np.where(np.arange(S) >= np.array(starts)[:, None], layout.decoder_slots, -1)
  start_BT = np.where(kept >= 0, np.array(starts, np.int32)[:, None], np.arange(1, S + 1))
  return layout._replace(
    decoder_slots=kept.astype(np.int32), decoder_segment_start=start_BT.astype(np.int32)
  )


class Small(NamedTuple):
  variables: dict
  forward: object  # (layout) -> logits [B, T, V]
  sampler: Sampler  # float32 rows, 8 slots at a time


def random_variables(cfg: ModelConfig) -> dict:
  """Away from where training starts, so that every term of every formula matters."""
  init = lambda key: nn.unbox(Model(cfg).init(key, layout_of(*[random_tokens(0, 3)] * B)))

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    rng = np.random.default_rng(int.from_bytes(name.encode(), "little") % 2**32)
    size = {"embed": 1.0, "scale": 0.5, "base": 0.3, "sink": 1.0, "bias": 0.1, "bias_vl": 0.1}
    kind, values = path[-1].key, rng.normal(size=leaf.shape)
    if kind in size:
      return np.float32(size[kind] * values)
    return np.float32(1 + 0.2 * values if leaf.ndim == 1 else 0.15 * values)

  return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init, jax.random.key(0)))


def assert_close(got, want, what="", tolerance=TOLERANCE):
  got, want = np.asarray(got), np.asarray(want)
  assert np.isfinite(got).all(), what
  error, largest = np.abs(got - want).max(), np.abs(want).max()
  assert error <= tolerance * largest, f"{what}: {error} of {largest}"


def with_copies(sequences, hits) -> Layout:
  """Rows in which the window of tokens before each hit stands a second time, right before it.

  Written out slot by slot: a copy sees nothing before the first copy, makes no entry, and sees the
  entries that its original sees. A pair that a hit cuts is made of the last copy and of the slot
  behind it, as W is even; blocks of a pool end with even hits alone.
  """
  pairs = list(zip(sequences, hits, strict=True))
  rows = layout_of(*[np.concatenate([tokens[:hit], tokens[hit - W :]]) for tokens, hit in pairs])
  for b, (tokens, hit) in enumerate(pairs):
    slots, end = np.arange(hit, hit + W), len(tokens) + W
    rows.is_copy[b, slots] = True
    rows.positions[b, hit:end] = np.arange(hit - W, len(tokens))
    rows.segment_start[b, hit:end] = hit
    whole = HASHING.rows(tokens)
    rows.engram_rows[b, hit:end] = whole[hit - W :]
    for m in CFG.ratios:
      rows.entry_slots[m][b, hit // m : (hit + W) // m] = -1
      rows.entry_end[m][b, slots] = (np.arange(hit - W, hit) + 1) // m
      rows.decoder_entry_end[m][b] = rows.entry_end[m][b]
  return rows
