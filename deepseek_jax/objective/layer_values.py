"""What the layers of a model report, by layer number instead of nested like the parameters."""

import operator
from typing import Any

import jax


def by_layer(tree: dict[str, Any]) -> dict[int, Any]:
  """Takes repeated groups apart: {"layer_3": x} or {"layers_4_7": {"layer_0": x}} -> {3: x, ...}.

  Args:
    tree: values of layers, trees of arrays; those of repeated groups have a leading axis, one place
      per repetition.
  """
  values = {}
  for name, value in tree.items():
    first = int(name.split("_")[1])
    if name.startswith("layer_"):
      values[first] = value
      continue
    for inner, stacked in value.items():
      layer = first + int(inner.split("_")[1])
      for repetition in range(len(jax.tree.leaves(stacked)[0])):
        place = operator.itemgetter(repetition)
        values[layer + repetition * len(value)] = jax.tree.map(place, stacked)
  return dict(sorted(values.items()))
