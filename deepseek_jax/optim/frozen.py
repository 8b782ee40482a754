"""Which parameters a stage leaves as they are: named by their role, or by their part."""

from collections.abc import Sequence
from typing import Any

import jax

from deepseek_jax.optim.partition import LOW_RANK, fixed_rules, role
from deepseek_jax.optim.parts import PARTS, part
from deepseek_jax.training_config import OptimConfig


def names() -> tuple[str, ...]:
  """What may be frozen: parts ("indexer") and roles inside a layer ("attn/indexer/wk")."""
  return *PARTS, *fixed_rules()


def frozen_names(cfg: OptimConfig) -> tuple[str, ...]:
  """What does not train: parts and roles that cfg names; with low_rank all that is no factor."""
  weights = tuple(part for part in PARTS if part != LOW_RANK) if cfg.low_rank.rank else ()
  return *cfg.frozen, *weights


def is_frozen(key: str, frozen: Sequence[str]) -> bool:
  """Whether a role, or its part, is among the names."""
  return key in frozen or part(key) in frozen


def without_gradient(params: Any, frozen: Sequence[str]) -> Any:
  """The same values; what follows from them gives the frozen ones a gradient of exactly 0.

  So that a norm of the gradient is of those that train, and nothing is computed for the others.
  """
  stop = lambda path, x: jax.lax.stop_gradient(x) if is_frozen(role(path), frozen) else x
  return jax.tree.map_with_path(stop, params)
