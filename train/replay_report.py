"""What serving costs on held-out conversations: bounded replay, FP4 entries, the candidate pool.

Every learned token of the validation rows is predicted twice, by the exact forward and by the one
that a server with replay makes; the same rows also run with FP4 entries and with the pool switched
the other way. Losses are in nats a learned token.
Legend: K buckets.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import Settings
from deepseek_jax.layout import Layout
from deepseek_jax.ops.agreement import Agreement
from deepseek_jax.step import TrainState
from train.batches import open_held_out
from train.evaluate_loss import EXACT, MODEL, REPLAYED, Validation, first_rows
from train.programs import hidden_states, loss_sums
from train.served import Match, approximations, match_slots, matched_agreement, row_sums

GAP, KL, TOP1 = "validation_replay_gap", "validation_replay_kl", "validation_replay_top1"
FP4, POOL = "validation_fp4_delta", "validation_pool_delta"  # loss with it minus loss without
# Tokens of a response by their number in it: the first ones have most of their window replayed.
BUCKETS = {"first_16": 16, "to_128": 128, "beyond_128": 2**31}
EDGES = list(BUCKETS.values())


class ReplayReport(Validation):
  """The first `validation.rows` rows of the validation split, exact and replayed.

  Before training as well: what it begins from may know nothing of replay.
  """

  before_training = True

  def __init__(self, settings: Settings, *args: Any) -> None:
    super().__init__(settings, *args)
    self._replayed = open_held_out(settings, self._group, replayed=True)
    self._compare = jax.jit(_comparison(settings))
    self._switched = {
      name: (sign, jax.jit(loss_sums(other))) for name, sign, other in _switched(settings)
    }

  def measure(self, state: TrainState) -> dict[str, float]:
    """Both losses, their difference and KL(exact || replayed), these two by bucket as well, the
    share of tokens with the same likeliest successor, and what FP4 and the pool add to the exact
    loss, beside bits per byte. A bucket without tokens has no metric.
    """
    variables = state.params, state.balance
    found, switched = [], {name: [] for name in self._switched}
    for exact, replayed in self._pairs():
      match = self._place(match_slots(exact, replayed, EDGES))
      exact, replayed = self._place(exact), self._place(replayed)
      found.append(self._compare(*variables, exact, replayed, match))
      for name, (_, evaluate) in self._switched.items():
        switched[name].append(evaluate(*variables, exact))
    self.tell_damage()
    sums = np.sum(np.asarray(jax.device_get(found), np.float64), axis=0)
    values = _metrics(sums)
    for name, (sign, _) in self._switched.items():
      nats, targets = np.sum(np.asarray(jax.device_get(switched[name]), np.float64), axis=0)
      values[name] = sign * (nats / max(targets, 1) - values[EXACT])
    return {MODEL: self._split.bits_per_byte(values[EXACT])} | values

  def _pairs(self) -> Iterator[tuple[Layout, Layout]]:
    group = self._group
    first = lambda batches: first_rows(batches, self.rows, host=group.index, hosts=group.count)
    for exact, replayed in zip(first(self._batches), first(self._replayed), strict=True):
      yield exact.layout, replayed.layout


def paired_agreement(settings: Settings) -> Callable[..., Agreement]:
  """(params, balance, exact, replayed, match) -> what the two forwards of the same rows make of
  each decoder slot of `replayed`: p is the exact one. Only learned tokens are paired.
  """
  hidden = hidden_states(settings)

  def compare(params: Any, balance: Any, exact: Layout, replayed: Layout, match: Match):
    p, q = hidden(params, balance, exact), hidden(params, balance, replayed)
    return matched_agreement(
      p.hidden_BTD,
      q.hidden_BTD,
      q.head_VD,
      replayed,
      match,
      chunk_tokens=settings.objective.vocab_chunk_tokens,
      compute_dtype=settings.model.numerics.compute_dtype,
    )

  return compare


def _comparison(settings: Settings) -> Callable:
  """(params, balance, exact, replayed, match) -> float32 [K, 5], the sum of row_sums."""
  agree = paired_agreement(settings)

  def compare(params: Any, balance: Any, exact: Layout, replayed: Layout, match: Match):
    agreement = agree(params, balance, exact, replayed, match)
    return jnp.sum(row_sums(agreement, replayed, match, len(BUCKETS)), axis=0)

  return compare


def _metrics(sums_K5: np.ndarray) -> dict[str, float]:
  means = lambda sums_5: sums_5[1:] / max(sums_5[0], 1)
  exact, replayed, kl, same = means(sums_K5.sum(axis=0))
  values = {EXACT: exact, REPLAYED: replayed, GAP: replayed - exact, KL: kl, TOP1: same}
  for name, sums_5 in zip(BUCKETS, sums_K5, strict=True):
    if sums_5[0] > 0:
      own_exact, own_replayed, own_kl, _ = means(sums_5)
      values |= {f"{GAP}_{name}": own_replayed - own_exact, f"{KL}_{name}": own_kl}
  return {name: float(value) for name, value in values.items()}


def _switched(settings: Settings) -> Iterator[tuple[str, int, Settings]]:
  """(metric, sign of its difference, settings with one approximation switched the other way)."""
  metrics = {"fp4": FP4, "pool": POOL}
  for name, (without, with_it) in approximations(settings.model).items():
    is_on = settings.model == with_it
    other = dataclasses.replace(settings, model=without if is_on else with_it)
    yield metrics[name], -1 if is_on else 1, other  # the loss that is added is the other one
