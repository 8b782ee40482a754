"""Mixture of experts: every token goes to its top experts and to the shared one, none is dropped.

Legend: B rows, Q slots, X = B Q tokens, D width, E experts, F hidden width, k experts per token,
P expert rows (expert_exchange).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.linear import dot, exact_dot, fp8_input
from deepseek_jax.ops import dispatch, expert_exchange, router
from deepseek_jax.ops.grouped_matmul import grouped_matmul
from deepseek_jax.types import Slots, Tap, no_tap

# Rows that share one expert's matrix in a block; small, since each expert wastes up to one block.
_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = {"cpu": 8, "gpu": 64, "tpu": 8}  # a tensor core's product has 64 rows on Hopper


def _clamped(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
  """silu(min(gate, limit)) * clip(up, -limit, limit) in float32."""
  gate = jnp.minimum(gate.astype(jnp.float32), limit)
  return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)


class SharedExpert(nn.Module):
  """w2 (silu(w1 x) * w3 x), clamped."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_XD: jax.Array) -> jax.Array:
    cfg, hidden = self.cfg, self.cfg.moe.hidden
    matrix = parameters.normal(cfg.init_std)
    w1_DF = parameters.declare(self, "w1", matrix, (cfg.dim, hidden), ("embed", "mlp"))
    w3_DF = parameters.declare(self, "w3", matrix, (cfg.dim, hidden), ("embed", "mlp"))
    w2_FD = parameters.declare(self, "w2", matrix, (hidden, cfg.dim), ("mlp", "embed"))
    x_XD = fp8_input(x_XD, cfg.numerics)
    gate_XF, up_XF = dot("xd,df->xf", x_XD, w1_DF), dot("xd,df->xf", x_XD, w3_DF)
    hidden_XF = _clamped(gate_XF, up_XF, cfg.moe.limit).astype(x_XD.dtype)
    return dot("xf,fd->xd", fp8_input(hidden_XF, cfg.numerics), w2_FD)


class RoutedExperts(nn.Module):
  """sum over a token's experts of w2 (weight * silu(w1 x) * w3 x), clamped, summed in float32."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_XD: jax.Array, expert_Xk: jax.Array, weight_Xk: jax.Array) -> jax.Array:
    cfg, moe = self.cfg, self.cfg.moe
    matrix = parameters.normal(cfg.init_std)
    axes_in, axes_out = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
    w1_EDF = parameters.declare(self, "w1", matrix, (moe.experts, cfg.dim, moe.hidden), axes_in)
    w3_EDF = parameters.declare(self, "w3", matrix, (moe.experts, cfg.dim, moe.hidden), axes_in)
    w2_EFD = parameters.declare(self, "w2", matrix, (moe.experts, moe.hidden, cfg.dim), axes_out)

    dtype = x_XD.dtype
    block_rows = _block_rows(expert_Xk.size, moe.experts)
    routes = expert_exchange.plan(expert_Xk, moe.experts, block_rows=block_rows)
    multiply = lambda x, w: grouped_matmul(
      fp8_input(x, cfg.numerics), w.astype(dtype), routes.group_rows_E, block_rows=block_rows
    )
    x_PD = expert_exchange.to_experts(x_XD, routes)
    weight_P = expert_exchange.weights_to_experts(weight_Xk, routes)
    hidden_PF = _clamped(multiply(x_PD, w1_EDF), multiply(x_PD, w3_EDF), moe.limit)
    y_PD = multiply((hidden_PF * weight_P[:, None]).astype(dtype), w2_EFD)
    return expert_exchange.from_experts(y_PD, routes)


def _block_rows(copies: int, experts: int) -> int:
  """About a quarter of an expert's mean load, a power of two, so that padding stays small."""
  block = _SMALLEST_BLOCK[dispatch.device().platform]
  while block < _LARGEST_BLOCK and block * 8 * experts <= copies:
    block *= 2
  return block


class Moe(nn.Module):
  """Router, routed experts and shared expert (model.md section 2.7)."""

  cfg: ModelConfig
  tap: Tap = no_tap

  @nn.compact
  def __call__(self, x_BQD: jax.Array, slots: Slots):
    """Returns the output [B, Q, D], text and vision loads [E], and the balance sum over rows."""
    cfg, moe, (rows, length, _) = self.cfg, self.cfg.moe, x_BQD.shape
    gate_DE = parameters.declare(
      self, "gate", parameters.normal(cfg.init_std), (cfg.dim, moe.experts), ("embed", None)
    )
    bias_E = self.variable("balance", "bias", jnp.zeros, (moe.experts,), jnp.float32).value
    bias_vl_E = self.variable("balance", "bias_vl", jnp.zeros, (moe.experts,), jnp.float32).value

    scores_BQE = router.sqrt_softplus(exact_dot("bqd,de->bqe", x_BQD, gate_DE))
    bias_BQE = jnp.where(slots.is_vision_BQ[..., None], bias_vl_E, bias_E)
    expert_BQk, weight_BQk = router.route(
      scores_BQE, bias_BQE, experts_per_token=moe.experts_per_token, scale=moe.route_scale
    )
    flat = lambda x: x.reshape(rows * length, x.shape[-1])
    expert_Xk = self.tap("ffn.router_experts", flat(expert_BQk))
    weight_Xk = self.tap("ffn.router_weights", flat(weight_BQk))
    x_XD = flat(x_BQD)
    routed_XD = RoutedExperts(cfg, name="experts")(x_XD, expert_Xk, weight_Xk)
    shared_XD = SharedExpert(cfg, name="shared")(x_XD)
    out_XD = (routed_XD + shared_XD.astype(jnp.float32)).astype(x_BQD.dtype)
    out_BQD = self.tap("ffn.out", out_XD.reshape(x_BQD.shape))

    vision_BQ = slots.counts_BQ & slots.is_vision_BQ
    vision_BE = router.expert_load(expert_BQk, vision_BQ, moe.experts)
    load_BE = router.expert_load(expert_BQk, slots.counts_BQ, moe.experts)
    balance = router.balance_loss(scores_BQE, load_BE, slots.counts_BQ)
    return out_BQD, (load_BE - vision_BE).sum(0), vision_BE.sum(0), balance
