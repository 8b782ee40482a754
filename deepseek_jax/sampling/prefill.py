"""Prompts into a cache: chunks through the encoder, and the last window through the decoder.

Legend: B sequences, C slots of a chunk, W window, G tokens that an n-gram reaches back, L Engram
tables, R table rows of a token, c streams, D width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.config import ModelConfig
from deepseek_jax.sampling.cache import Cache
from deepseek_jax.sampling.forward import Reached
from deepseek_jax.sampling.memory import take, whole


class Tail(NamedTuple):
  """The last W slots at the decoder's door; the newest of each sequence is the last."""

  reached: Reached
  begin_B: jax.Array  # int32 position of the first one that was there


def empty_tail(cfg: ModelConfig, cache: Cache) -> Tail:
  """Nothing reached yet, at the cache's position."""
  rows, window = len(cache.position), cfg.attention.window
  dtype, tables = cfg.numerics.compute_dtype, len(cfg.engram.layers)
  reached = Reached(
    streams_BTcD=jnp.zeros((rows, window, cfg.streams, cfg.dim), dtype),
    x_BTD=jnp.zeros((rows, window, cfg.dim), dtype),
    engram_rows_BTLR=jnp.zeros(
      (rows, window, tables, cfg.engram.lookups if tables else 0), jnp.int32
    ),
  )
  return Tail(reached, cache.position + 0)  # a buffer of its own, for donation


def push(tail: Tail, reached: Reached, count_B: jax.Array) -> Tail:
  """The tail after the first count_B slots of a chunk."""
  window = tail.reached.x_BTD.shape[1]
  kept_BW = count_B[:, None] + jnp.arange(window)

  join = lambda old_BW, new_BC: jnp.concatenate([whole(old_BW), whole(new_BC)], axis=1)
  return tail._replace(reached=take(jax.tree.map(join, tail.reached, reached), kept_BW))


class Admitted(NamedTuple):
  """Which slots of a tail enter the decoder."""

  cache: Cache  # with the decoder's windows beginning where they will
  reached: Reached  # first the slots that count
  first_B: jax.Array  # int32 position of the first one
  count_B: jax.Array


def enter(tail: Tail, cache: Cache) -> Admitted:
  """The last window of the prompt, or all of it where it is shorter.

  A shorter one goes on with the windows that the decoder has; a longer one starts new ones, which
  is what prefill leaves out (model.md section 5.1).
  """
  window = tail.reached.x_BTD.shape[1]
  first_B = jnp.maximum(tail.begin_B, cache.position - window)
  count_B = cache.position - first_B
  place_BW = jnp.minimum((window - count_B)[:, None] + jnp.arange(window), window - 1)
  start_B = jnp.where(first_B > tail.begin_B, first_B, cache.decoder_start)
  reached = take(tail.reached, place_BW)
  return Admitted(cache._replace(decoder_start=start_B), reached, first_B, count_B)
