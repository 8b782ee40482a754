"""Engram: rows of a hashed n-gram table, gated into every stream.

Legend: B rows, Q slots, R table rows of a token, h channels of a row, c streams, D width.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from deepseek_jax.config import ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.health import report
from deepseek_jax.nn.linear import fp8_input
from deepseek_jax.ops.matmul import dot
from deepseek_jax.ops.table_lookup import table_lookup
from deepseek_jax.types import Slots, Tap, no_tap

_DOT_FLOOR = 1e-6  # below it the square root's slope is cut (model.md section 2.8.4)


def gate(
  streams_XcD: jax.Array, key_XcD: jax.Array, gain_cD: jax.Array, *, eps: float
) -> jax.Array:
  """[X, c] float32: sigmoid of the signed root of the normalized product of stream and key."""
  streams, keys = streams_XcD.astype(jnp.float32), key_XcD.astype(jnp.float32)
  inverse_rms = lambda x: jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
  scale = inverse_rms(streams) * inverse_rms(keys) * streams.shape[-1] ** -0.5
  product = jnp.sum(streams * gain_cD * keys, axis=-1) * scale
  root = jnp.sqrt(jnp.maximum(jnp.abs(product), _DOT_FLOOR))
  return jax.nn.sigmoid(jnp.where(jnp.signbit(product), -root, root))


class Engram(nn.Module):
  """X[c] += gate[c] * value, read from table number `table` (model.md section 2.8.4)."""

  cfg: ModelConfig
  table: int
  tap: Tap = no_tap

  @nn.compact
  def __call__(self, streams_BQcD: jax.Array, slots: Slots) -> jax.Array:
    cfg, size, c = self.cfg, self.cfg.engram, self.cfg.streams
    matrix = parameters.normal(cfg.init_std)
    table = parameters.declare(
      self,
      "table",
      parameters.normal_rows(cfg.init_std, size.table_rows[self.table]),
      (size.stored_rows[self.table], size.head_dim),
      ("table_rows", None),
    )
    width = size.lookups * size.head_dim
    wkv = parameters.declare(self, "wkv", matrix, (width, (c + 1) * cfg.dim), (None, "embed"))
    gains = lambda name: parameters.declare(
      self, name, parameters.ones, (c, cfg.dim), (None, "embed")
    )
    gain_cD = gains("q_weight") * gains("k_weight")

    rows_BQR = self.tap("engram.rows", slots.engram_rows_BQLR[:, :, self.table])
    read_BQRh = table_lookup(table, rows_BQR, streams_BQcD.dtype)
    read = fp8_input(read_BQRh.reshape(*rows_BQR.shape[:2], width), cfg.numerics)
    key_value = dot("bqw,wd->bqd", read, wkv)
    key_BQcD = key_value[..., : c * cfg.dim].reshape(*rows_BQR.shape[:2], c, cfg.dim)
    value_BQD = self.tap("engram.value", key_value[..., c * cfg.dim :])

    gate_BQc = gate(streams_BQcD, key_BQcD, gain_cD, eps=cfg.norm_eps)
    dead_BQ = slots.is_vision_BQ | (rows_BQR[..., 0] < 0)
    gate_BQc = self.tap("engram.gate", jnp.where(dead_BQ[..., None], 0.0, gate_BQc))
    report(self, "engram_gate", jnp.sum(gate_BQc), c * jnp.sum(~dead_BQ))
    added = gate_BQc[..., None] * value_BQD.astype(jnp.float32)[..., None, :]
    out = (streams_BQcD.astype(jnp.float32) + added).astype(streams_BQcD.dtype)
    return self.tap("engram.out", out)
