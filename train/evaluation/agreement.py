"""Two forwards of the same tokens: how far their next-token distributions are apart, and where.

Legend: R rows, B rows of a call, S encoder slots, T decoder slots, D width, K buckets.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Layout
from deepseek_jax.model import Model
from deepseek_jax.sharding import to_host
from train.batches import RowGroup, placer
from train.evaluation.model import EvaluatedModel
from train.served import Match, matched_agreement, row_sums

METRICS = ("tokens", "loss", "changed_loss", "loss_gap", "kl", "top1")


class Forward(NamedTuple):
  cfg: ModelConfig  # with the same parameters as the model's
  layout: Layout


class Comparison(NamedTuple):
  right: Forward  # T = S, or as `changed`
  changed: Forward  # its targets and weights are looked at
  match: Match


def distances(longest: int) -> list[int]:
  """0, 1, 2, 4, ...: the first number of each bucket, up to at least `longest`."""
  return [0, *(1 << n for n in range(max(1, longest - 1).bit_length()))]


def edges(starts: list[int]) -> list[int]:
  """What `match_slots` asks for: one past the last number of each bucket."""
  return [*starts[1:], 2**31]


def by_position(layout: Layout, starts: list[int]) -> Match:
  """Every token with itself, bucketed by how many tokens of its document stand before it."""
  slot_BT = np.maximum(layout.decoder_slots, 0)
  before_BT = np.take_along_axis(layout.positions, slot_BT, axis=1)
  bucket_BT = np.searchsorted(edges(starts), before_BT, side="right").astype(np.int32)
  here_BT = np.broadcast_to(np.arange(slot_BT.shape[1], dtype=np.int32), slot_BT.shape)
  return Match(here_BT, bucket_BT)


def compare(model: EvaluatedModel, comparison: Comparison, buckets: int) -> np.ndarray:
  """float64 [B, K, 5], as `row_sums` has it."""
  right, changed, match = comparison
  hidden = [hidden_states(model, forward) for forward in (right, changed)]
  program = _agreement_program(
    buckets, model.settings.objective.vocab_chunk_tokens, model.cfg.numerics.compute_dtype
  )
  layout, match = place(model, (changed.layout, match))
  with jax.set_mesh(model.mesh):
    sums_BK5 = program(*hidden, model.variables["params"]["head"], layout, match)
    return np.asarray(to_host(sums_BK5), np.float64)


def metrics(sums_RK5: np.ndarray, axis: str, starts: list[int]) -> dict[str, Any]:
  """Means over tokens, and tables of them by bucket.

  Args:
    sums_RK5: see row_sums.
    axis: what buckets are of.
    starts: the first number of each.

  Returns: METRICS: "loss" and "changed_loss" [nats a token] and the second minus the first, mean
    "kl" (right || changed) [nats], share "top1" of tokens with the same likeliest successor. Then
    {axis}: starts, and "tokens", "loss_gap", "kl" and "top1" of each bucket as "kl_by_{axis}", ...;
    None without tokens.
  """
  found: dict[str, Any] = _means(sums_RK5.sum(axis=(0, 1)))
  found[axis] = starts
  of_bucket = [_means(sums_5) for sums_5 in sums_RK5.sum(axis=0)]
  for name in ("tokens", "loss_gap", "kl", "top1"):
    found[f"{name}_by_{axis}"] = [own[name] for own in of_bucket]
  return found


def row_metrics(sums_K5: np.ndarray) -> dict[str, Any]:
  return _means(sums_K5.sum(axis=0))


def _means(sums_5: np.ndarray) -> dict[str, Any]:
  tokens = float(sums_5[0])
  if tokens == 0:
    return dict.fromkeys(METRICS) | {"tokens": 0.0}
  right, changed, kl, same = (sums_5[1:] / tokens).tolist()
  return dict(zip(METRICS, (tokens, right, changed, changed - right, kl, same), strict=True))


def hidden_states(model: EvaluatedModel, forward: Forward) -> jax.Array:
  """float32 [B, T, D], on the devices."""
  with jax.set_mesh(model.mesh):
    return _hidden_program(forward.cfg)(model.variables, place(model, forward.layout))


def place(model: EvaluatedModel, tree: Any) -> Any:
  """Arrays [B, ...] on the devices; B is what the mesh divides (EvaluatedModel.rows_of)."""
  rows = len(jax.tree.leaves(tree)[0])
  return placer(model.mesh, RowGroup(0, 1, np.arange(rows)))(tree)


@functools.lru_cache(maxsize=8)
def _hidden_program(cfg: ModelConfig) -> Any:
  model: Any = Model(cfg)
  return jax.jit(lambda variables, layout: model.apply(variables, layout).hidden_BTD)


@functools.lru_cache(maxsize=8)
def _agreement_program(buckets: int, chunk_tokens: int, compute_dtype: str) -> Any:
  numerics = {"chunk_tokens": chunk_tokens, "compute_dtype": compute_dtype}

  def sums(p_hidden_BTD, q_hidden_BTD, head_VD, layout: Layout, match: Match) -> jax.Array:
    found = matched_agreement(p_hidden_BTD, q_hidden_BTD, head_VD, layout, match, **numerics)
    return row_sums(found, layout, match, buckets)

  return jax.jit(sums)
