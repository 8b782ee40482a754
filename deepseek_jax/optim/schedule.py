"""The learning rate over time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from deepseek_jax.training_config import OptimConfig

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def learning_rate(cfg: OptimConfig, total_steps: int) -> Schedule:
  """Linear warm-up, then a cosine: update number (from 0) -> rate.

  rate(n) = peak (n + 1) / warmup                                                  n < warmup
  rate(n) = final + (peak - final) (1 + cos(pi (n + 1 - warmup) / (total - warmup))) / 2

  The first update moves parameters already, and the last one, total - 1, has the final rate; later
  ones keep it.

  Raises: ValueError if no update is left after the warm-up.
  """
  if not 0 <= cfg.warmup_steps < total_steps:
    raise ValueError(
      f"optim.warmup_steps is {cfg.warmup_steps}; it must be at least 0 and below total_steps, "
      f"which is {total_steps}."
    )
  rate = optax.warmup_cosine_decay_schedule(
    0.0, cfg.peak_lr, cfg.warmup_steps, total_steps, cfg.final_lr
  )
  return lambda update: jnp.asarray(rate(update + 1))
