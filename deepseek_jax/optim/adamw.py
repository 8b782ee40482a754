"""AdamW with the decay and the learning rates of each parameter group."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from deepseek_jax.optim.partition import Group, is_group
from deepseek_jax.optim.schedule import learning_rate
from deepseek_jax.training_config import OptimConfig

TABLE_LR = 5.0  # of Engram tables, relative to the rest (model.md section 6.2)


def make_optimizer(cfg: OptimConfig, total_steps: int) -> optax.GradientTransformation:
  """Clips the global gradient, then AdamW; its state is float32 and shaped like the parameters.

  g <- g min(1, clip_norm / |g|);  w <- w - lr (m_hat / (sqrt(v_hat) + eps) + decay w)

  Raises: ValueError, on init, for a parameter that no group is known for.
  """
  return optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps, mu_dtype=jnp.float32),
    optax.add_decayed_weights(cfg.weight_decay, is_group(Group.DECAYED)),
    optax.masked(optax.scale(TABLE_LR), is_group(Group.TABLE)),
    optax.scale_by_learning_rate(learning_rate(cfg, total_steps)),
  )


def update_count(opt_state: Any) -> jax.Array:
  """int32 number of updates applied so far, the argument of the learning rate."""
  return opt_state[-1].count
