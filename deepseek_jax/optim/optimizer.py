"""The optimizer of a run: every group of parameters by its own rule, at one learning rate."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from deepseek_jax.config import EngramConfig
from deepseek_jax.optim.frozen import frozen_names, is_frozen
from deepseek_jax.optim.muon import scale_by_muon
from deepseek_jax.optim.partition import (
  Group,
  counted_rows,
  factors,
  groups,
  logical_matrix,
  role,
  rule,
  stored_along,
)
from deepseek_jax.optim.schedule import Span, learning_rate
from deepseek_jax.optim.sinkhorn_momentum import scale_by_balanced_momentum
from deepseek_jax.training_config import OptimConfig

_FROZEN = "frozen"  # label of what is in no group


def make_optimizer(
  cfg: OptimConfig, spans: Sequence[Span], engram: EngramConfig
) -> optax.GradientTransformation:
  """Clips the global gradient, then moves every group of parameters by its rule.

  g <- g min(1, clip_norm / |g|);  w <- w - lr factor (direction(g) + decay w)

  State is float32; the name of an array in it ends with the name of its parameter. What is in
  frozen.frozen_names does not move and has no state; its gradient should be 0
  (frozen.without_gradient), for it counts in |g| like any other.

  Args:
    cfg: which rules, and their numbers.
    spans: updates of the whole run, for the learning rate.
    engram: how many rows of each table exist.

  Raises: ValueError, on init, for a parameter that no group is known for.
  """
  still = frozen_names(cfg)

  def label(path: tuple[Any, ...], group: Group) -> str:
    return _FROZEN if is_frozen(role(path), still) else group.value

  rules: dict[Hashable, optax.GradientTransformation] = {_FROZEN: optax.set_to_zero()}
  rules |= {group.value: _group_rule(group, cfg, engram) for group in Group}
  return optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    optax.partition(
      rules,
      lambda params: jax.tree.map_with_path(label, groups(params)),
    ),
    optax.scale_by_learning_rate(learning_rate(cfg, spans)),
  )


def update_count(opt_state: Any) -> jax.Array:
  """int32 number of updates applied so far, the argument of the learning rate."""
  return opt_state[-1].count


def like_parameters(opt_state: Any, of_params: Any, otherwise: Any) -> Any:
  """A tree like opt_state, with each parameter's leaf of `of_params` at the state kept for it.

  Args:
    opt_state: of `make_optimizer`.
    of_params: a tree like the parameters.
    otherwise: what counters get.
  """
  leaves = dict(jax.tree.leaves_with_path(of_params))

  def choose(path: tuple[Any, ...], _: Any) -> Any:
    ends = (path[start:] for start in range(len(path)))
    return next((leaves[end] for end in ends if end in leaves), otherwise)

  return jax.tree.map_with_path(choose, opt_state)


def _group_rule(
  group: Group, cfg: OptimConfig, engram: EngramConfig
) -> optax.GradientTransformation:
  lr, decay = factors(group, cfg)
  return optax.chain(
    _direction(group, cfg, engram), optax.add_decayed_weights(decay), optax.scale(lr)
  )


def _direction(
  group: Group, cfg: OptimConfig, engram: EngramConfig
) -> optax.GradientTransformation:
  match rule(group, cfg):
    case "Muon":
      return scale_by_muon(
        logical_matrix,
        stored_along,
        momentum=cfg.momentum,
        rms=cfg.update_rms,
        dtype=cfg.muon_dtype,
      )
    case "Sinkhorn":
      return scale_by_balanced_momentum(
        lambda path, shape: counted_rows(path, shape, engram),
        momentum=cfg.momentum,
        rms=cfg.update_rms,
      )
    case _:
      return optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps, mu_dtype=jnp.float32)
