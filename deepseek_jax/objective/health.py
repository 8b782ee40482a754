"""What the layers of a model report about their condition, as the metrics of a step."""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

from deepseek_jax.objective.layer_values import by_layer

_OF_EACH_LAYER = ("recall", "pool_recall")  # how well an index source serves each of its layers
_LARGEST = ("largest_logit",)  # of all layers; of the others the mean


def health_metrics(health: dict[str, Any]) -> dict[str, jax.Array]:
  """Means over a batch, float32 scalars.

  Args:
    health: the collection of nn/health.py, summed over the pieces of a batch: pairs of a total and
      a count.

  Returns: "recall" (share of the attention on all visible entries that falls on the chosen ones)
    and "pool_recall" (on the candidate pool), also of every layer as "recall_layer_N"; "sink_mass"
    and "window_mass" (shares of attention; the entries have the rest); "largest_logit"; "hc_error"
    (largest distance of a mixing matrix's row or column sum from 1), "stream_rms", "engram_gate",
    "clamp_hits" (share of the shared experts' hidden values that were clamped).
  """
  found: dict[str, dict[int, jax.Array]] = defaultdict(dict)
  for layer, reports in by_layer(health).items():
    for path, pair_2 in jax.tree.leaves_with_path(reports):
      found[path[-1].key][layer] = pair_2
  metrics = {}
  for name, pairs in found.items():
    each = {layer: _ratio(pair_2) for layer, pair_2 in pairs.items()}
    if name in _OF_EACH_LAYER:
      metrics |= {f"{name}_layer_{layer}": value for layer, value in each.items()}
    every = jnp.stack(list(each.values()))
    metrics[name] = jnp.max(every) if name in _LARGEST else _ratio(sum(pairs.values()))
  return metrics


def _ratio(pair_2: Any) -> jax.Array:
  total, count = pair_2
  return total / jnp.where(count > 0, count, 1.0)
