"""Weights as decoding reads them: what modules round to the compute dtype is rounded once."""

from typing import Any

import jax
import jax.numpy as jnp

from deepseek_jax.config import ModelConfig

# What enters a product or a sum in the compute dtype. Read in float32 are: gains, sinks, router,
# hyper-connections, compressors of several tokens, and the output embedding.
ROUNDED = frozenset(
  ("embed", "engram/table", "engram/wkv")
  + tuple(f"attn/{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
  + tuple(f"indexer/{name}" for name in ("wq_b", "weights_proj", "wk"))
  + tuple(f"{expert}/w{number}" for expert in ("experts", "shared") for number in (1, 2, 3))
)


def decoding_dtype(cfg: ModelConfig, path: str) -> jnp.dtype:
  """What a parameter may lie in without changing a step's result.

  Args:
    cfg: of the model.
    path: in a tree with a subtree per layer, as in "layer_3/attn/wq_a".
  """
  *folders, name = path.split("/")
  rounded = "/".join((*folders[-1:], name)) in ROUNDED
  if folders[-1:] == ["compressor"] and name == "wkv":
    rounded = cfg.schedule()[int(folders[0].removeprefix("layer_"))].ratio == 1
  return jnp.dtype(cfg.numerics.compute_dtype if rounded else jnp.float32)


def decoding_weights(cfg: ModelConfig, variables: Any) -> Any:
  """{"params", "balance"} with a subtree per layer, each parameter in its `decoding_dtype`."""

  def lay(path, x: jax.Array) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return jnp.asarray(x, decoding_dtype(cfg, name))

  return variables | {"params": jax.tree_util.tree_map_with_path(lay, variables["params"])}
