"""One layer, and a group of layers as the unit of the scan.

Legend: B rows, S encoder slots, T decoder slots, Q either, c streams, D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from deepseek_jax.by_slots import KEPT
from deepseek_jax.config import LayerSpec, ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.attention import SELECTION, Attention
from deepseek_jax.nn.engram import Engram
from deepseek_jax.nn.health import report
from deepseek_jax.nn.hyper_connection import HyperConnection
from deepseek_jax.nn.moe import Moe
from deepseek_jax.ops.hyper_connection import collapse, expand
from deepseek_jax.ops.rms_norm import rms_norm
from deepseek_jax.ops.table_lookup import start_rows
from deepseek_jax.sharding import constrain
from deepseek_jax.training_config import IndexerLoss
from deepseek_jax.types import Entries, LayerAux, LayerCarry, Slots, Tap, no_tap


class Surroundings(NamedTuple):
  """What every layer may look at and none changes."""

  encoder: Slots
  decoder: Slots
  decoder_slots_BT: jax.Array  # int32 encoder slot of each decoder slot, clamped into range
  entries: dict[int, Entries]  # by ratio


class Block(nn.Module):
  """Engram if it has one, then an attention site and an MoE site (model.md section 2.2).

  Each site collapses the streams with the weights that the site before it predicted.
  """

  cfg: ModelConfig
  spec: LayerSpec
  indexer_loss: IndexerLoss = "off"
  observed_queries: int = 0
  tap: Tap = no_tap

  def setup(self):
    cfg, spec, tap = self.cfg, self.spec, self.tap
    gain = lambda name: parameters.declare(self, name, parameters.ones, (cfg.dim,), ("embed",))
    if spec.engram is not None:
      self.engram = Engram(cfg, spec.engram, tap)
    self.attn_norm = gain("attn_norm")
    self.attn = Attention(cfg, spec, self.indexer_loss, self.observed_queries, tap)
    self.hc_attn = HyperConnection(cfg, 2 * spec.layer)
    self.ffn_norm = gain("ffn_norm")
    self.moe = Moe(cfg, tap)
    self.hc_ffn = HyperConnection(cfg, 2 * spec.layer + 1)

  def __call__(self, carry: LayerCarry, around: Surroundings) -> tuple[LayerCarry, LayerAux]:
    cfg, spec = self.cfg, self.spec
    in_decoder = cfg.decoder_start is not None and spec.layer >= cfg.decoder_start
    slots = around.decoder if in_decoder else around.encoder
    streams, x_BQD = self.enter(carry, around.encoder if spec.starts_decoder else slots)
    if spec.kind == "full":  # entries come from every encoder slot, also at the decoder's start
      carry = self.attn.compress(x_BQD, around.entries[spec.ratio], carry)
    if spec.starts_decoder:
      streams, x_BQD = start_rows((streams, x_BQD), around.decoder_slots_BT)
    y_BQD, carry, kl = self.attn(x_BQD, slots, around.entries, carry)
    return self.leave(streams, y_BQD, slots, carry, kl)

  def enter(self, carry: LayerCarry, slots: Slots) -> tuple[jax.Array, jax.Array]:
    """The streams after Engram, and the attention's input [B, Q, D]."""
    streams = carry.streams_BQcD
    if self.spec.engram is not None:
      streams = self.engram(streams, slots)
    x_BQD = collapse(streams, carry.pre_mix_BQc)
    return streams, self.tap("attn_in", rms_norm(x_BQD, self.attn_norm, eps=self.cfg.norm_eps))

  def leave(
    self, streams, y_BQD: jax.Array, slots: Slots, carry: LayerCarry, kl: jax.Array
  ) -> tuple[LayerCarry, LayerAux]:
    """What attention found goes into the streams, and then through the experts."""
    tap = self.tap
    at_attention = _observed(tap, "hc_attn", self.hc_attn(streams))
    y_BQD = checkpoint_name(y_BQD, _RESULT)
    streams = expand(y_BQD, streams, at_attention.post_Xc, at_attention.comb_Xcc)

    at_ffn = _observed(tap, "hc_ffn", self.hc_ffn(streams))
    x_BQD = collapse(streams, at_attention.pre_Xc)
    x_BQD = tap("ffn_in", rms_norm(x_BQD, self.ffn_norm, eps=self.cfg.norm_eps))
    z_BQD, load_text, load_vision, balance, rounds = self.moe(x_BQD, slots)
    z_BQD = checkpoint_name(z_BQD, _RESULT)
    streams = tap("streams", expand(z_BQD, streams, at_ffn.post_Xc, at_ffn.comb_Xcc))
    streams = constrain(streams, "batch", "slots", None, None)
    self._report(streams, at_ffn.comb_Xcc)
    carry = carry._replace(streams_BQcD=streams, pre_mix_BQc=at_ffn.pre_Xc)
    return carry, LayerAux(load_text, load_vision, balance, kl, rounds)

  def _report(self, streams_BQcD: jax.Array, comb_BQcc: jax.Array) -> None:
    """How large the streams are, and how far the mixing is from one that keeps their mean."""
    sums = jnp.concatenate([jnp.sum(comb_BQcc, axis=axis) for axis in (-2, -1)], axis=-1)
    error_BQ = jnp.max(jnp.abs(sums - 1), axis=-1)
    report(self, "hc_error", jnp.sum(error_BQ), error_BQ.size)
    square_BQ = jnp.mean(jnp.square(streams_BQcD.astype(jnp.float32)), axis=(-2, -1))
    report(self, "stream_rms", jnp.sum(jnp.sqrt(square_BQ)), square_BQ.size)


def _observed(tap: Tap, name: str, site):
  return type(site)(
    pre_Xc=tap(f"{name}.pre", site.pre_Xc),
    post_Xc=tap(f"{name}.post", site.post_Xc),
    comb_Xcc=tap(f"{name}.comb", site.comb_Xcc),
  )


_RESULT = "result of a site"  # what attention or the experts add to the streams

# cfg.remat -> names of what a block's backward pass finds; it computes everything else again, from
# the block's input. None: all is kept.
REMAT = {
  "none": None,
  "block": (SELECTION,),
  # 2 H d + 4 H bytes of attention and 4 D of results, a token and layer, in bfloat16
  "block_keep_results": (SELECTION, KEPT, _RESULT),
}


def make_block(
  cfg: ModelConfig,
  spec: LayerSpec,
  name: str,
  indexer_loss: IndexerLoss,
  observed_queries: int,
  tap: Tap,
  *,
  repeated: bool = False,
):
  """A Block whose backward pass computes again what cfg.remat says.

  Outside a loop the compiler would notice that it is computed again, and keep it all the same.
  """
  names, kind = REMAT[cfg.remat], Block
  if names is not None:
    keep = jax.checkpoint_policies.save_only_these_names(*names)
    kind = nn.remat(Block, prevent_cse=not repeated, policy=keep)
  return kind(cfg, spec, indexer_loss, observed_queries, tap, name=name)


class Group(nn.Module):
  """Layers that repeat together; streams flow through, entries from outside stay constant."""

  cfg: ModelConfig
  layers: tuple[LayerSpec, ...]
  indexer_loss: IndexerLoss = "off"
  observed_queries: int = 0

  @nn.compact
  def __call__(self, flow, constant: tuple[LayerCarry, Surroundings]):
    outside, around = constant
    carry = outside._replace(streams_BQcD=flow[0], pre_mix_BQc=flow[1])
    aux = {}
    for number, spec in enumerate(self.layers):
      name = f"layer_{number}"
      block = make_block(
        self.cfg, spec, name, self.indexer_loss, self.observed_queries, no_tap, repeated=True
      )
      carry, aux[name] = block(carry, around)
    return (carry.streams_BQcD, carry.pre_mix_BQc), aux
