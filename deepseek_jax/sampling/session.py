"""One text that grows by turns: what it shares with the text before is not computed again."""

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.sampling.cache import Cache, capacity, without_windows
from deepseek_jax.sampling.sampler import Sampler


class Session:
  """A cache of one sequence, and the tokens that it holds."""

  def __init__(self, sampler: Sampler, *, exact: bool = False) -> None:
    self._sampler, self._exact = sampler, exact
    self._held = np.zeros(0, np.int32)
    self._cache: Cache | None = None

  def read(self, tokens: np.ndarray, room: int) -> jax.Array:
    """Logits [1, V] behind a text, float32.

    A text that begins with all that is held goes on from there. One that parts from it behind more
    than a window goes on from that place, whose window passes through the encoder again (model.md
    section 5.2). Any other one is read whole.

    Args:
      tokens: int32, at least one.
      room: tokens that may follow.
    """
    sampler, exact = self._sampler, self._exact
    most = min(len(self._held), len(tokens) - 1)  # the last one is read again: it has the logits
    differs = np.flatnonzero(self._held[:most] != tokens[:most])
    shared = int(differs[0]) if len(differs) else most
    cache, self._cache = self._cache, None
    room_there = cache is not None and _fits(sampler, cache, len(tokens) + room)
    if cache is not None and room_there and shared == len(self._held):
      cache, logits_BV = sampler.prefill(cache, [tokens[shared:]], exact=exact)
    elif cache is not None and room_there and shared > sampler.cfg.attention.window:
      cache = without_windows(cache._replace(position=jnp.full_like(cache.position, shared)))
      held, new = [tokens[:shared]], [tokens[shared:]]
      cache, logits_BV = sampler.resume(cache, held, new, exact=exact)
    else:
      cache = sampler.new_cache(1, 2 * (len(tokens) + room))  # so that a few turns fit
      cache, logits_BV = sampler.prefill(cache, [tokens], exact=exact)
    self._cache, self._held = cache, tokens
    return logits_BV

  def step(self, tokens_B: np.ndarray, active_B: np.ndarray) -> jax.Array:
    """Appends a token, as `Sampler.step`."""
    assert self._cache is not None, "nothing was read"
    self._cache, logits_BV = self._sampler.step(self._cache, tokens_B, active_B)
    self._held = np.append(self._held, np.int32(tokens_B[0]))
    return logits_BV


def _fits(sampler: Sampler, cache: Cache, tokens: int) -> bool:
  room = capacity(sampler.cfg, cache)
  return room is None or tokens <= room
