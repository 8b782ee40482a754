"""Mixture of experts: every token goes to its top experts and to the shared one, none is dropped.

Legend: B rows, Q slots, D width, E experts, F hidden width, k experts per token, P expert rows
(expert_exchange).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.health import report
from deepseek_jax.nn.linear import fp4_expert, fp8_input
from deepseek_jax.ops import expert_exchange, router
from deepseek_jax.ops.matmul import dot, exact_dot
from deepseek_jax.types import Slots, Tap, no_tap


def _clamped(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
  """silu(min(gate, limit)) * clip(up, -limit, limit) in float32."""
  gate = jnp.minimum(gate.astype(jnp.float32), limit)
  return jax.nn.silu(gate) * jnp.clip(up.astype(jnp.float32), -limit, limit)


class SharedExpert(nn.Module):
  """w2 (silu(w1 x) * w3 x), clamped."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BQD: jax.Array) -> jax.Array:
    cfg, hidden = self.cfg, self.cfg.moe.hidden
    matrix = parameters.normal(cfg.init_std)
    w1_DF = parameters.declare(self, "w1", matrix, (cfg.dim, hidden), ("embed", "mlp"))
    w3_DF = parameters.declare(self, "w3", matrix, (cfg.dim, hidden), ("embed", "mlp"))
    w2_FD = parameters.declare(self, "w2", matrix, (hidden, cfg.dim), ("mlp", "embed"))
    x_BQD = fp8_input(x_BQD, cfg.numerics)
    gate_BQF, up_BQF = dot("bqd,df->bqf", x_BQD, w1_DF), dot("bqd,df->bqf", x_BQD, w3_DF)
    hidden_BQF = _clamped(gate_BQF, up_BQF, cfg.moe.limit).astype(x_BQD.dtype)
    hits_BQF = (gate_BQF > cfg.moe.limit) | (jnp.abs(up_BQF) > cfg.moe.limit)
    report(self, "clamp_hits", jnp.sum(hits_BQF, dtype=jnp.float32), hits_BQF.size)
    return dot("bqf,fd->bqd", fp8_input(hidden_BQF, cfg.numerics), w2_FD)


class RoutedExperts(nn.Module):
  """sum over a token's experts of w2 (weight * silu(w1 x) * w3 x), clamped, summed in float32."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BQD: jax.Array, expert_BQk: jax.Array, weight_BQk: jax.Array):
    """Returns [B, Q, D] float32 and the rounds in which tokens travelled, float32 []."""
    cfg, moe = self.cfg, self.cfg.moe
    axes_in, axes_out = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")

    def matrix(name: str, inputs: int, outputs: int, axes: tuple[str, ...]) -> jax.Array:
      start, shape = parameters.normal(cfg.init_std), (moe.experts, inputs, outputs)
      return fp4_expert(parameters.declare(self, name, start, shape, axes), cfg.numerics)

    w1_EDF = matrix("w1", cfg.dim, moe.hidden, axes_in)
    w3_EDF = matrix("w3", cfg.dim, moe.hidden, axes_in)
    w2_EFD = matrix("w2", moe.hidden, cfg.dim, axes_out)

    def feed_forward(multiply, x_PD, weight_P, w1_EDF, w3_EDF, w2_EFD):
      x_PD, dtype = fp8_input(x_PD, cfg.numerics), x_PD.dtype
      hidden_PF = _clamped(multiply(x_PD, w1_EDF), multiply(x_PD, w3_EDF), moe.limit)
      hidden_PF = (hidden_PF * weight_P[:, None]).astype(dtype)
      return multiply(fp8_input(hidden_PF, cfg.numerics), w2_EFD)

    matrices = (w1_EDF, axes_in), (w3_EDF, axes_in), (w2_EFD, axes_out)
    return expert_exchange.apply_experts(
      feed_forward, x_BQD, expert_BQk, weight_BQk, matrices, receive_factor=moe.receive_factor
    )


class Moe(nn.Module):
  """Router, routed experts and shared expert (model.md section 2.7)."""

  cfg: ModelConfig
  tap: Tap = no_tap

  @nn.compact
  def __call__(self, x_BQD: jax.Array, slots: Slots):
    """Returns [B, Q, D], text and vision loads [E], the balance sum over rows, and the rounds."""
    cfg, moe = self.cfg, self.cfg.moe
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
    observed = lambda name, x: self.tap(name, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    expert_BQk = observed("ffn.router_experts", expert_BQk)
    weight_BQk = observed("ffn.router_weights", weight_BQk)
    routed_BQD, rounds = RoutedExperts(cfg, name="experts")(x_BQD, expert_BQk, weight_BQk)
    shared_BQD = SharedExpert(cfg, name="shared")(x_BQD)
    out_BQD = (routed_BQD + shared_BQD.astype(jnp.float32)).astype(x_BQD.dtype)
    out_BQD = self.tap("ffn.out", out_BQD)

    vision_BQ = slots.counts_BQ & slots.is_vision_BQ
    vision_BE = router.expert_load(expert_BQk, vision_BQ, moe.experts)
    load_BE = router.expert_load(expert_BQk, slots.counts_BQ, moe.experts)
    balance = router.balance_loss(scores_BQE, load_BE, slots.counts_BQ)
    return out_BQD, (load_BE - vision_BE).sum(0), vision_BE.sum(0), balance, rounds
