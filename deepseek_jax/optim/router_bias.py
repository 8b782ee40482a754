"""Balancing without a loss: router biases move against the load, once per step.

Legend: E experts; leading axes of repeated layer groups are left out.
"""

from typing import Any

import jax
import jax.numpy as jnp

from deepseek_jax.objective.layer_values import by_layer
from deepseek_jax.types import LayerAux


def update(balance: dict, layers: dict, speed: float) -> dict:
  """New biases from the loads of a whole step, text and image-span slots apart.

  b <- b + speed sign(mean(load) - load);  b <- b - mean(b)

  Without the second part the mean drifts, since signs need not add up to 0. Kinds of slots that the
  step has none of keep their bias. Source: model.md section 6.4; centring is ours.

  Args:
    balance: {"bias", "bias_vl"} of each layer under "moe", float32 [E].
    layers: LayerAux per layer, summed over the step; nested like balance.
    speed: absolute change per step; at 0 the biases stay as they are, to the bit.
  """
  if not speed:  # centring again would still move their last bits
    return balance

  def layer(aux: LayerAux, biases: dict) -> dict:
    moe = biases["moe"]
    return {
      "moe": {
        "bias": _move(moe["bias"], aux.load_text_E, speed),
        "bias_vl": _move(moe["bias_vl"], aux.load_vision_E, speed),
      }
    }

  return jax.tree.map(layer, layers, balance, is_leaf=_is_aux)


def imbalance(layers: dict) -> jax.Array:
  """Largest load of text slots over the mean, in the worst layer: float32 [], 1 when balanced."""
  return jnp.max(jnp.stack([jnp.max(each) for each in jax.tree.leaves(_imbalances(layers))]))


def condition(balance: dict, layers: dict) -> dict[str, jax.Array]:
  """How far routing is from even, float32 scalars of the worst layer: "router_entropy" (of the text
  slots' loads, over the largest there is: 1 when balanced) and "router_bias_range"; of every layer
  "router_imbalance_layer_N", as `imbalance` has it for the worst.
  """

  def entropy(aux: LayerAux) -> jax.Array:
    load_E = aux.load_text_E
    share_E = load_E / jnp.maximum(jnp.sum(load_E, axis=-1, keepdims=True), 1.0)
    of_layer = jnp.sum(jax.scipy.special.entr(share_E), axis=-1) / jnp.log(load_E.shape[-1])
    return jnp.min(of_layer)

  ranges = [jnp.max(jnp.ptp(bias_E, axis=-1)) for bias_E in jax.tree.leaves(balance)]
  reports = jax.tree.leaves(layers, is_leaf=_is_aux)
  return {
    "router_entropy": jnp.min(jnp.stack([entropy(aux) for aux in reports])),
    "router_bias_range": jnp.max(jnp.stack(ranges)),
    **{f"router_imbalance_layer_{n}": each for n, each in by_layer(_imbalances(layers)).items()},
  }


def _imbalances(layers: dict) -> dict:
  """float32 [] of every layer, nested like the layers."""

  def of_layer(aux: LayerAux) -> jax.Array:
    mean = jnp.mean(aux.load_text_E, axis=-1)
    return jnp.max(aux.load_text_E, axis=-1) / jnp.where(mean > 0, mean, 1.0)

  return jax.tree.map(of_layer, layers, is_leaf=_is_aux)


def _move(bias_E: jax.Array, load_E: jax.Array, speed: float) -> jax.Array:
  moved_E = bias_E + speed * jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)
  centred_E = moved_E - jnp.mean(moved_E, axis=-1, keepdims=True)
  return jnp.where(jnp.any(load_E > 0, axis=-1, keepdims=True), centred_E, bias_E)


def _is_aux(value: Any) -> bool:
  return isinstance(value, LayerAux)
