"""Which experts a token goes to, with which weight, and the sequence balance loss.

Legend: B rows, Q slots, X tokens, E experts, k experts per token.
"""

import jax
import jax.numpy as jnp

from deepseek_jax.by_slots import by_slots

# Below this softplus(x) = e^x to float32 precision, and e^(x/2), its root, has a finite slope.
_SMALL = -15.0


def sqrt_softplus(x: jax.Array) -> jax.Array:
  """sqrt(log(1 + e^x)) with finite gradients for every finite x."""
  far = x < _SMALL
  near_value = jnp.sqrt(jax.nn.softplus(jnp.where(far, 0.0, x)))
  return jnp.where(far, jnp.exp(0.5 * jnp.where(far, x, 0.0)), near_value)


def route(
  scores_XE: jax.Array, bias_XE: jax.Array, *, experts_per_token: int, scale: float
) -> tuple[jax.Array, jax.Array]:
  """Top experts by score + bias; their weights are the plain scores, normalized to `scale`.

  Returns: expert_Xk int32 by descending biased score (lowest id first among equals), weight_Xk
  float32. Source: model.md section 2.7.
  """
  choose = lambda _, biased_XE, *__: jax.lax.top_k(biased_XE, experts_per_token)[1]
  expert_Xk = by_slots(choose, jax.lax.stop_gradient(scores_XE + bias_XE))
  score_Xk = jnp.take_along_axis(scores_XE, expert_Xk, axis=-1)
  # The release adds 1e-20 to the sum; the square of that underflows in the gradient.
  total_X1 = jnp.maximum(jnp.sum(score_Xk, axis=-1, keepdims=True), 1e-18)
  weight_Xk = score_Xk / total_X1 * scale
  return expert_Xk.astype(jnp.int32), weight_Xk


def expert_load(expert_BQk: jax.Array, counts_BQ: jax.Array, experts: int) -> jax.Array:
  """[B,E] float32 number of counting slots of each row that go to each expert."""
  hits_BQkE = (expert_BQk[..., None] == jnp.arange(experts)) & counts_BQ[..., None, None]
  return jnp.sum(hits_BQkE, axis=(1, 2)).astype(jnp.float32)


def balance_loss(scores_BQE: jax.Array, load_BE: jax.Array, counts_BQ: jax.Array) -> jax.Array:
  """Sum over rows of sum_e f_e P_e, the sequence being one row.

  f_e = E / (k n) load_e, P_e = mean over the row's n counting slots of score_e / sum of scores.
  A row without counting slots adds 0. Only P has a gradient. Source: model.md section 6.4.
  """
  experts = scores_BQE.shape[-1]
  share_BQE = scores_BQE / (jnp.sum(scores_BQE, axis=-1, keepdims=True) + 1e-20)
  slots_B1 = jnp.maximum(jnp.sum(counts_BQ, axis=1, dtype=jnp.float32), 1.0)[:, None]
  mean_BE = jnp.sum(jnp.where(counts_BQ[..., None], share_BQE, 0.0), axis=1) / slots_B1
  routed_B1 = jnp.maximum(jnp.sum(load_BE, axis=-1, keepdims=True), 1.0)  # k n
  return jnp.sum(jax.lax.stop_gradient(experts * load_BE / routed_B1) * mean_BE)
