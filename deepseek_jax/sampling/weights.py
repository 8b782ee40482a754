"""Weights of a trained model as decoding wants them: a subtree per layer."""

from typing import Any

import jax

from deepseek_jax.config import ModelConfig


def unrolled(cfg: ModelConfig, tree: Any) -> Any:
  """Parameters or router biases of a Model -> those of one with scan_layers=False.

  Args:
    cfg: of the Model that the tree belongs to.
    tree: arrays; groups of equal layers have an axis in front.
  """
  out = {name: sub for name, sub in tree.items() if not name.startswith("layers_")}
  for group in cfg.scan_plan():
    if group.repeat == 1:
      continue
    for number, spec in enumerate(group.layers):
      for repetition in range(group.repeat):
        layer = spec.layer + repetition * len(group.layers)
        stacked = tree[group.name][f"layer_{number}"]
        out[f"layer_{layer}"] = jax.tree.map(lambda x, r=repetition: x[r], stacked)
  return out
