"""The objective of pretraining. Legend: B rows, T decoder slots, D width, V vocabulary."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepseek_jax.layout import Layout
from deepseek_jax.objective.denominators import Denominators
from deepseek_jax.objective.layer_values import by_layer
from deepseek_jax.ops.cross_entropy import linear_cross_entropy
from deepseek_jax.training_config import ObjectiveConfig
from deepseek_jax.types import ModelOutput


def loss(
  output: ModelOutput,
  layout: Layout,
  denominators: Denominators,
  cfg: ObjectiveConfig,
  compute_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Next-token loss, sequence balance loss and the KL of the indexers, for a piece of a batch.

  loss = sum_x w_x nll_x / tokens + balance_weight * sum_layers balance / rows
         + indexer_weight * sum_layers kl / queries_of_the_layer

  Layers are added up, not averaged: for the balance loss that is V3's form (model.md 6.4); for the
  KL it is our choice, like its weight, since the report discloses neither. The KL reaches only
  indexer parameters, so under Adam the sum and a mean differ little.

  Args:
    output: sums over the piece, as the model reports them.
    layout: the piece.
    denominators: counts of the whole batch; pieces then add up to the batch.
    cfg: weights of the terms and the number of tokens whose logits exist at a time.
    compute_dtype: of the operands of the output layer.

  Returns:
    loss: float32 scalar, in nats.
    metrics: float32 scalars, each the piece's share of the batch's value: "nll" [nats/token],
      "balance" (a perfectly balanced layer adds 1), "indexer_kl" and "indexer_kl_layer_N" [nats].
  """
  nll = linear_cross_entropy(
    output.hidden_BTD,
    output.head_VD,
    layout.targets,
    layout.weights,
    chunk_tokens=cfg.vocab_chunk_tokens,
    compute_dtype=compute_dtype,
  )
  layers = by_layer(output.layers)
  total = lambda values: sum(values, start=jnp.zeros((), jnp.float32))
  metrics = {
    "nll": nll / denominators.tokens,
    "balance": total(aux.balance for aux in layers.values()) / denominators.rows,
  }
  scalar = metrics["nll"] + cfg.balance_weight * metrics["balance"]
  if cfg.indexer == "off":
    return scalar, metrics

  kl = {n: layers[n].indexer_kl / queries for n, queries in denominators.queries.items()}
  metrics["indexer_kl"] = total(kl.values())
  metrics |= {f"indexer_kl_layer_{n}": value for n, value in kl.items()}
  return scalar + cfg.indexer_weight * metrics["indexer_kl"], metrics


def make_loss_fn(
  apply: Callable[..., ModelOutput], cfg: ObjectiveConfig, compute_dtype: jax.typing.DTypeLike
) -> Callable:
  """The loss in the form that the step takes.

  Returns: (params, balance, layout, denominators) -> (loss, (metrics, LayerAux of the layers, what
    they report of their health)).
  """

  def loss_fn(params: Any, balance: Any, layout: Layout, denominators: Denominators):
    output = apply({"params": params, "balance": balance}, layout)
    scalar, metrics = loss(output, layout, denominators, cfg, compute_dtype)
    return scalar, (metrics, output.layers, output.health)

  return loss_fn
