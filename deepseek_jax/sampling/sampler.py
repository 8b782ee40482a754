"""Programs of decoding, each compiled once for its shapes, and the host's part between them.

Legend: B sequences, C slots of a chunk, W window, G tokens that an n-gram reaches back, L Engram
tables, R table rows of a token, T decoder slots, D width, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.config import ModelConfig
from deepseek_jax.model import logits
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sampling.cache import NO_TOKEN, Cache, capacity, decoding_config, empty_cache
from deepseek_jax.sampling.forward import CachedModel
from deepseek_jax.sampling.memory import take
from deepseek_jax.sampling.prefill import Tail, empty_tail, enter, push
from deepseek_jax.sharding import to_host
from deepseek_jax.types import ModelOutput

# Kernels of the indexer take so many entries at a time: where the last tile is not full, every step
# would copy all keys to fill it. Caches of few tokens are as long as they need to be.
_TILE, _LONG = 128, 2048


class Sampler:
  """Prefill and decode for one set of weights. Caches that go in are consumed.

  Args:
    cfg: of the trained model.
    variables: {"params", "balance"} with a subtree per layer, in float32 or as `decoding_dtype`
      has them.
    hashing: Engram hash; None where there is no table.
    packed: rows lie in the bytes of the release; otherwise in the compute dtype.
    chunk: slots that go through a prefill at a time.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    variables: Any,
    hashing: NgramHash | None,
    *,
    packed: bool = True,
    chunk: int = 2048,
  ) -> None:
    self.cfg, self.packed, self.chunk = decoding_config(cfg, packed=packed), packed, chunk
    self._variables, self._hashing = variables, hashing
    self.programs = Programs(CachedModel(self.cfg, packed=packed))

  def new_cache(self, rows: int, tokens: int) -> Cache:
    """An empty cache for sequences of up to so many tokens, or a few more."""
    step = int(np.lcm.reduce(self.cfg.ratios)) if self.cfg.ratios else 1
    step *= _TILE if tokens > _LONG else 1
    return empty_cache(self.cfg, rows=rows, capacity=-(-tokens // step) * step, packed=self.packed)

  def prefill(
    self, cache: Cache, prompts: Sequence[np.ndarray], *, exact: bool = False
  ) -> tuple[Cache, jax.Array]:
    """Appends a prompt to every sequence; they may differ in length, none is empty.

    Args:
      cache: consumed.
      prompts: int32 tokens of each sequence.
      exact: every token goes through every layer; otherwise the decoder sees the last window.

    Returns: the cache, and float32 [B, V] logits of each sequence's last token.
    Raises: ValueError for an empty prompt, and where the cache has no room.
    """
    _check_prompts(self.cfg, cache, prompts)
    return self._run(cache, [(prompts, True)], exact)

  def resume(
    self,
    cache: Cache,
    held: Sequence[np.ndarray],
    prompts: Sequence[np.ndarray],
    *,
    exact: bool = False,
  ) -> tuple[Cache, jax.Array]:
    """As prefill, behind a cache whose windows were dropped (`without_windows`).

    The last window of tokens goes through the encoder again to fill its windows; what is before is
    hidden from it. Entries stay as they are (model.md section 5.2).

    Args:
      held: the tokens that the cache holds, more than a window of each sequence.

    Raises: ValueError for fewer: those are better computed anew; for tokens of another number than
      the cache holds; and as prefill does.
    """
    window = self.cfg.attention.window
    _check_prompts(self.cfg, cache, prompts)
    if (counts := [len(tokens) for tokens in held]) != (here := to_host(cache.position).tolist()):
      raise ValueError(f"held has sequences of {counts} tokens, the cache of {here}.")
    if short := [len(tokens) for tokens in held if len(tokens) <= window]:
      raise ValueError(f"held has sequences of {short} tokens, accepted are more than {window}.")
    copies = [tokens[-window:] for tokens in held]
    return self._run(_at_copies(cache, held, window), [(copies, False), (prompts, True)], exact)

  def _run(self, cache: Cache, passes, exact: bool) -> tuple[Cache, jax.Array]:
    """Passes of tokens, each with whether it writes entries."""
    exact = exact or self.cfg.decoder_start is None
    tail, last_BV = empty_tail(self.cfg, cache), jnp.zeros(())
    recent_BG = to_host(cache.recent)
    for tokens, write in passes:
      for tokens_BC, count_B in _chunks(tokens, self.chunk):
        # The host's own tokens, so that programs queue up without waiting for one another.
        arguments = tokens_BC, self.engram_rows(recent_BG, tokens_BC), count_B
        recent_BG = _recent(recent_BG, tokens_BC, count_B)
        if exact:
          cache, new_BV = self.programs.extend(self._variables, cache, *arguments, write=write)
          last_BV = jnp.where(count_B[:, None] > 0, new_BV, last_BV)
        else:
          cache, tail = self.programs.push(self._variables, cache, tail, *arguments, write=write)
    return (cache, last_BV) if exact else self.programs.enter(self._variables, cache, tail)

  def step(self, cache: Cache, tokens_B: np.ndarray, active_B: np.ndarray):
    """Appends a token to each active sequence: the cache (consumed), and logits [B, V] float32.

    Raises: ValueError where the cache has no room.
    """
    tokens_B1, count_B = np.asarray(tokens_B, np.int32)[:, None], np.asarray(active_B, np.int32)
    _check_room(self.cfg, cache, count_B)
    rows = self.engram_rows(to_host(cache.recent), tokens_B1)
    return self.programs.extend(self._variables, cache, tokens_B1, rows, count_B, write=True)

  def engram_rows(self, recent_BG: np.ndarray, tokens_BC: np.ndarray) -> np.ndarray:
    """int32 [B, C, L, R] rows that the tokens read behind the last ones before them."""
    if self._hashing is None:
      return np.zeros((*tokens_BC.shape, 0, 0), np.int32)
    ids_BX = np.concatenate([recent_BG, tokens_BC], axis=1)
    absent_BX = ids_BX < 0
    hashed = [
      self._hashing.rows(ids, absent)
      for ids, absent in zip(np.where(absent_BX, 0, ids_BX), absent_BX, strict=True)
    ]
    return np.stack(hashed)[:, -tokens_BC.shape[1] :]


class Programs:
  """What a Sampler runs, compiled for each shape; the first argument of each are the weights.

  Caches and tails that go in are consumed.
  """

  def __init__(self, model: CachedModel) -> None:
    self._encode = functools.partial(cast(Any, model.apply), method="encode")
    self._decode = functools.partial(cast(Any, model.apply), method="decode")
    self.push = jax.jit(self._push, donate_argnums=(1, 2), static_argnames="write")
    self.enter = jax.jit(self._enter, donate_argnums=1)
    self.extend = jax.jit(self._extend, donate_argnums=1, static_argnames="write")

  def _push(self, variables, cache: Cache, tail: Tail, tokens_BC, rows, count_B, *, write=True):
    """Encoder layers on a chunk, remembered for the decoder."""
    cache, reached = self._encode(variables, cache, tokens_BC, rows, count_B, write=write)
    return cache, push(tail, reached, count_B)

  def _enter(self, variables, cache: Cache, tail: Tail):
    """Decoder layers on the last window: the cache, and logits of the last token."""
    cache, reached, first_B, count_B = enter(tail, cache)
    cache, hidden_BTD = self._decode(variables, cache, reached, first_B, count_B)
    return cache, _last_logits(variables, hidden_BTD, count_B)

  def _extend(self, variables, cache: Cache, tokens_BC, rows, count_B, *, write=True):
    """All layers on a chunk: the cache, and logits of each sequence's last token."""
    first_B = cache.position
    cache, reached = self._encode(variables, cache, tokens_BC, rows, count_B, write=write)
    cache, hidden_BTD = self._decode(variables, cache, reached, first_B, count_B, write=write)
    return cache, _last_logits(variables, hidden_BTD, count_B)


def _last_logits(variables, hidden_BTD: jax.Array, count_B: jax.Array) -> jax.Array:
  last_B1D = take(hidden_BTD, count_B[:, None] - 1)
  return logits(ModelOutput(last_B1D, variables["params"]["head"], {}))[:, 0]


def _chunks(tokens: Sequence[np.ndarray], chunk: int):
  """int32 [B, C] pieces from the left, and how many tokens of each row they hold.

  C is the chunk, or for short inputs the next power of two, so that few programs are compiled.
  """
  longest = max(map(len, tokens))
  width = min(chunk, 1 << max(longest - 1, 0).bit_length())
  padded_BX = np.zeros((len(tokens), -(-longest // width) * width), np.int32)
  for row, own in zip(padded_BX, tokens, strict=True):
    row[: len(own)] = own
  length_B = np.array([len(own) for own in tokens], np.int32)
  for start in range(0, padded_BX.shape[1], width):
    yield padded_BX[:, start : start + width], np.clip(length_B - start, 0, width)


def _recent(recent_BG: np.ndarray, tokens_BC: np.ndarray, count_B: np.ndarray) -> np.ndarray:
  """The last G tokens behind a chunk of which each row has so many."""
  ids_BX = np.concatenate([recent_BG, tokens_BC], axis=1)
  place_BG = count_B[:, None] + np.arange(recent_BG.shape[1])
  return np.take_along_axis(ids_BX, place_BG, axis=1)


def _check_prompts(cfg: ModelConfig, cache: Cache, prompts: Sequence[np.ndarray]) -> None:
  if empty := [number for number, tokens in enumerate(prompts) if not len(tokens)]:
    raise ValueError(f"prompts {empty} are empty, accepted is one token and more.")
  _check_room(cfg, cache, [len(tokens) for tokens in prompts])


def _check_room(cfg: ModelConfig, cache: Cache, new_B: Sequence[int] | np.ndarray) -> None:
  ends = to_host(cache.position) + new_B
  room = capacity(cfg, cache)
  if room is not None and ends.max() > room:
    raise ValueError(f"the cache has room for {room} tokens, {ends.max()} are needed.")


def _at_copies(cache: Cache, held: Sequence[np.ndarray], window: int) -> Cache:
  """The cache as the copies of the last window of tokens find it."""
  reach = cache.recent.shape[1]
  before = [np.pad(t[:-window], (reach, 0), constant_values=NO_TOKEN) for t in held]
  recent_BG = np.stack([t[len(t) - reach :] for t in before]).astype(np.int32)
  start = lambda: cache.position - window
  return cache._replace(
    position=start(), encoder_start=start(), decoder_start=start(), recent=jnp.asarray(recent_BG)
  )
