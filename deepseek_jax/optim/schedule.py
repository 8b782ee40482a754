"""The learning rate over time: warm-up by updates, everything after it by tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from deepseek_jax.training_config import OptimConfig

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


class Span(NamedTuple):
  """Updates that follow one another, with equally many tokens each."""

  updates: int
  tokens: int  # slots in the batch of one update, padding included


def tokens_after(spans: Sequence[Span]) -> Schedule:
  """Number of updates -> tokens in their batches, float32; none are counted after the last span.

  Updates, not steps: a skipped step moves neither the parameters nor their learning rate.
  """

  def tokens(updates: jax.typing.ArrayLike) -> jax.Array:
    total, first = jnp.zeros((), jnp.float32), 0
    for span in spans:
      inside = jnp.clip(jnp.asarray(updates) - first, 0, span.updates)
      total += inside.astype(jnp.float32) * float(span.tokens)  # beyond int32
      first += span.updates
    return total

  return tokens


def learning_rate(cfg: OptimConfig, spans: Sequence[Span]) -> Schedule:
  """Linear warm-up, constant, cosine, constant: update number (from 0) -> rate.

  rate(n) = peak (n + 1) / warmup                                  n < warmup
  rate(n) = final + (peak - final) (1 + cos(pi x)) / 2             else
  x = (tokens(n + 1) - decay_begin) / (decay_end - decay_begin), kept within 0 ... 1

  The first update moves parameters already. By tokens, because batches may grow from one stage of a
  run to the next. Source: model.md section 6.1.

  Args:
    cfg: rates, and where the cosine lies.
    spans: the updates of the whole run, all its stages.

  Raises: ValueError if no update is left after the warm-up, or none between warm-up and decay_end.
  """
  total = sum(span.updates for span in spans)
  if not 0 <= cfg.warmup_steps < total:
    raise ValueError(
      f"optim.warmup_steps is {cfg.warmup_steps}; it must be at least 0 and below total_steps, "
      f"which is {total}."
    )
  begin, end = decay(cfg, spans)
  if not total_tokens(spans, cfg.warmup_steps) <= begin < end:
    raise ValueError(
      f"optim.decay_begin ({begin:,}) must lie between the end of the warm-up "
      f"({total_tokens(spans, cfg.warmup_steps):,} tokens) and optim.decay_end ({end:,})."
    )
  tokens = tokens_after(spans)
  warm_up = optax.linear_schedule(0.0, cfg.peak_lr, cfg.warmup_steps)
  share = cfg.final_lr / cfg.peak_lr if cfg.peak_lr else 0.0
  after = optax.cosine_decay_schedule(cfg.peak_lr, end - begin, share)

  def rate(update: jax.typing.ArrayLike) -> jax.Array:
    taken = jnp.asarray(update) + 1
    past_begin = jnp.maximum(tokens(taken) - float(begin), 0.0)
    return jnp.where(taken < cfg.warmup_steps, warm_up(taken), after(past_begin))

  return rate


def decay(cfg: OptimConfig, spans: Sequence[Span]) -> tuple[int, int]:
  """Tokens at which the cosine begins and ends."""
  begin, end = cfg.decay_begin, cfg.decay_end
  begin = total_tokens(spans, cfg.warmup_steps) if begin is None else begin
  return begin, total_tokens(spans) if end is None else end


def total_tokens(spans: Sequence[Span], updates: int | None = None) -> int:
  """Tokens in the batches of the first `updates` updates; None: of all of them."""
  total = 0
  for span in spans:
    taken = span.updates if updates is None else min(updates, span.updates)
    total += taken * span.tokens
    updates = None if updates is None else updates - taken
  return total
