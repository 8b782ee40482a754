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
from deepseek_jax.types import ModelOutput


class Sampler:
  """Prefill and decode for one set of weights. Caches that go in are consumed.

  Args:
    cfg: of the trained model.
    variables: {"params", "balance"} with a subtree per layer, see `unrolled`.
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
    programs = Programs(CachedModel(self.cfg, packed=packed))
    self._push = jax.jit(programs.push, donate_argnums=(1, 2), static_argnames="write")
    self._enter = jax.jit(programs.enter, donate_argnums=1)
    self._extend = jax.jit(programs.extend, donate_argnums=1, static_argnames="write")

  def new_cache(self, rows: int, tokens: int) -> Cache:
    """An empty cache for sequences of up to so many tokens."""
    step = int(np.lcm.reduce(self.cfg.ratios)) if self.cfg.ratios else 1
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
    if (counts := [len(tokens) for tokens in held]) != (
      here := np.asarray(cache.position).tolist()
    ):
      raise ValueError(f"held has sequences of {counts} tokens, the cache of {here}.")
    if short := [len(tokens) for tokens in held if len(tokens) <= window]:
      raise ValueError(f"held has sequences of {short} tokens, accepted are more than {window}.")
    copies = [tokens[-window:] for tokens in held]
    return self._run(_at_copies(cache, held, window), [(copies, False), (prompts, True)], exact)

  def _run(self, cache: Cache, passes, exact: bool) -> tuple[Cache, jax.Array]:
    """Passes of tokens, each with whether it writes entries."""
    exact = exact or self.cfg.decoder_start is None
    tail, last_BV = empty_tail(self.cfg, cache), jnp.zeros(())
    for tokens, write in passes:
      for tokens_BC, count_B in _chunks(tokens, self.chunk):
        arguments = tokens_BC, self.engram_rows(cache, tokens_BC), count_B
        if exact:
          cache, new_BV = self._extend(self._variables, cache, *arguments, write=write)
          last_BV = jnp.where(count_B[:, None] > 0, new_BV, last_BV)
        else:
          cache, tail = self._push(self._variables, cache, tail, *arguments, write=write)
    return (cache, last_BV) if exact else self._enter(self._variables, cache, tail)

  def step(self, cache: Cache, tokens_B: np.ndarray, active_B: np.ndarray):
    """Appends a token to each active sequence: the cache (consumed), and logits [B, V] float32.

    Raises: ValueError where the cache has no room.
    """
    tokens_B1, count_B = np.asarray(tokens_B, np.int32)[:, None], np.asarray(active_B, np.int32)
    _check_room(self.cfg, cache, count_B)
    rows = self.engram_rows(cache, tokens_B1)
    return self._extend(self._variables, cache, tokens_B1, rows, count_B, write=True)

  def engram_rows(self, cache: Cache, tokens_BC: np.ndarray) -> np.ndarray:
    """int32 [B, C, L, R] rows that the tokens read behind those that the cache remembers."""
    if self._hashing is None:
      return np.zeros((*tokens_BC.shape, 0, 0), np.int32)
    ids_BX = np.concatenate([np.asarray(cache.recent), tokens_BC], axis=1)
    absent_BX = ids_BX < 0
    hashed = [
      self._hashing.rows(ids, absent)
      for ids, absent in zip(np.where(absent_BX, 0, ids_BX), absent_BX, strict=True)
    ]
    return np.stack(hashed)[:, -tokens_BC.shape[1] :]


class Programs:
  """What a Sampler compiles; the first argument of each are the weights."""

  def __init__(self, model: CachedModel) -> None:
    self._encode = functools.partial(cast(Any, model.apply), method="encode")
    self._decode = functools.partial(cast(Any, model.apply), method="decode")

  def push(self, variables, cache: Cache, tail: Tail, tokens_BC, rows, count_B, *, write=True):
    """Encoder layers on a chunk, remembered for the decoder."""
    cache, reached = self._encode(variables, cache, tokens_BC, rows, count_B, write=write)
    return cache, push(tail, reached, count_B)

  def enter(self, variables, cache: Cache, tail: Tail):
    """Decoder layers on the last window: the cache, and logits of the last token."""
    cache, reached, first_B, count_B = enter(tail, cache)
    cache, hidden_BTD = self._decode(variables, cache, reached, first_B, count_B)
    return cache, _last_logits(variables, hidden_BTD, count_B)

  def extend(self, variables, cache: Cache, tokens_BC, rows, count_B, *, write=True):
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


def _check_prompts(cfg: ModelConfig, cache: Cache, prompts: Sequence[np.ndarray]) -> None:
  if empty := [number for number, tokens in enumerate(prompts) if not len(tokens)]:
    raise ValueError(f"prompts {empty} are empty, accepted is one token and more.")
  _check_room(cfg, cache, [len(tokens) for tokens in prompts])


def _check_room(cfg: ModelConfig, cache: Cache, new_B: Sequence[int] | np.ndarray) -> None:
  ends = np.asarray(cache.position) + new_B
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
