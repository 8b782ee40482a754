"""The backbone: tokens to the hidden states that the output embedding reads.

Legend: B rows, S encoder slots, T decoder slots, N entry cells, c streams, D width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from deepseek_jax.config import LayerGroup, ModelConfig
from deepseek_jax.layout import TEXT, Layout, real_slots
from deepseek_jax.nn import parameters
from deepseek_jax.nn.block import Group, Surroundings, make_block
from deepseek_jax.nn.health import COLLECTION
from deepseek_jax.ops.hyper_connection import collapse
from deepseek_jax.ops.rms_norm import rms_norm
from deepseek_jax.ops.table_lookup import start_rows
from deepseek_jax.sharding import constrain
from deepseek_jax.training_config import IndexerLoss
from deepseek_jax.types import Entries, LayerCarry, ModelOutput, Slots, Tap, no_tap


class Model(nn.Module):
  """Embedding, the layers of cfg.schedule(), last norm (model.md section 2.1).

  Attributes:
    indexer_loss: which loss of the indexers is computed beside the outputs.
    observed_queries: of each row, that layers report the attention of in the collection "health";
      with 0, which is fit for a model that is not trained, they report the rest.
    tap: observes named values (see types.Tap); anything but the default needs scan_layers=False.
  """

  cfg: ModelConfig
  indexer_loss: IndexerLoss = "off"
  observed_queries: int = 0
  tap: Tap = no_tap

  def setup(self):
    cfg = self.cfg
    matrix, shape, axes = parameters.normal(cfg.init_std), (cfg.vocab, cfg.dim), ("vocab", "embed")
    self.embed_VD = parameters.declare(self, "embed", matrix, shape, axes)
    self.head_VD = parameters.declare(self, "head", matrix, shape, axes)
    self.gain_D = parameters.declare(self, "norm", parameters.ones, (cfg.dim,), ("embed",))
    self.groups = [self._group(group) for group in cfg.scan_plan()]

  def __call__(self, layout: Layout) -> ModelOutput:
    if self.cfg.decoder_start is None and layout.decoder_slots.shape != layout.tokens.shape:
      raise ValueError(
        f"the layout has {layout.decoder_slots.shape[1]} decoder slots for "
        f"{layout.tokens.shape[1]} encoder slots, but decoder_start is None: there is no decoder."
      )
    around = surroundings(layout)
    carry = self.begin(layout.tokens)
    aux = {}
    for group, modules in zip(self.cfg.scan_plan(), self.groups, strict=True):
      carry, layers = self._run(group, modules, carry, around)
      aux |= layers
    return ModelOutput(self.finish(carry), self.head_VD, aux)

  def begin(self, tokens_BS: jax.Array) -> LayerCarry:
    """The first layer's input: the embedding in every stream, of which it reads the first."""
    cfg = self.cfg
    h_BSD = self.tap("embed_out", self._embed(self.embed_VD, tokens_BS))
    return LayerCarry(
      streams_BQcD=jnp.repeat(h_BSD[:, :, None], cfg.streams, axis=2),
      pre_mix_BQc=jnp.broadcast_to(
        jnp.arange(cfg.streams) == 0, (*tokens_BS.shape, cfg.streams)
      ).astype(jnp.float32),
      shared_kv_BNd=None,
      index_keys_BNi=None,
      selection_BQK=None,
      selection_plan=None,
      pool_BQW=None,
    )

  def finish(self, carry: LayerCarry) -> jax.Array:
    """Hidden states [B, T, D] after the last norm, float32."""
    x_BTD = self.tap("final_hidden", collapse(carry.streams_BQcD, carry.pre_mix_BQc))
    return rms_norm(x_BTD, self.gain_D, eps=self.cfg.norm_eps).astype(jnp.float32)

  def _embed(self, embed_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """[B, S, D] in the compute dtype.

    On a mesh every device reads its channels for all tokens of its copy of the weights; then tokens
    come home, one mesh axis at a time: in one step the compiler gathers [B, S, D] everywhere.
    """
    tokens_BS = constrain(tokens_BS, "copy_rows", None)
    h_BSD = embed_VD[tokens_BS].astype(self.cfg.numerics.compute_dtype)
    h_BSD = constrain(h_BSD, "copy_rows", None, "embed")
    h_BSD = constrain(h_BSD, "copy_rows", "slots", "embed")
    return constrain(h_BSD, "batch", "slots", None)

  def _group(self, group: LayerGroup) -> Any:
    """A scanned Group, or a list of Blocks where nothing repeats."""
    if group.repeat > 1:
      constant: Any = nn.broadcast
      scanned = nn.scan(
        Group,
        variable_axes={"params": 0, "balance": 0, COLLECTION: 0},
        split_rngs={"params": True},
        in_axes=constant,
        length=group.repeat,
        metadata_params={nn.PARTITION_NAME: "layers"},
      )
      return scanned(
        self.cfg, group.layers, self.indexer_loss, self.observed_queries, name=group.name
      )
    blocks = []
    for spec in group.layers:
      tap = lambda key, value, spec=spec: self.tap(f"layers.{spec.layer}.{key}", value)
      tap = no_tap if self.tap is no_tap else tap
      name = f"layer_{spec.layer}"
      blocks.append(make_block(self.cfg, spec, name, self.indexer_loss, self.observed_queries, tap))
    return blocks

  def _run(self, group: LayerGroup, modules: Any, carry: LayerCarry, around: Surroundings):
    if group.repeat == 1:
      aux = {}
      for block in modules:
        carry, aux[block.name] = block(carry, around)
      return carry, aux
    outside = carry._replace(
      streams_BQcD=None, pre_mix_BQc=None, selection_BQK=None, selection_plan=None
    )
    flow, aux = modules((carry.streams_BQcD, carry.pre_mix_BQc), (outside, around))
    return carry._replace(streams_BQcD=flow[0], pre_mix_BQc=flow[1]), {group.name: aux}


def surroundings(layout: Layout) -> Surroundings:
  """The layout as the layers look at it."""
  start_BT = jnp.maximum(layout.decoder_slots, 0)
  is_vision_BS = layout.modality != TEXT
  counts_BS = real_slots(layout)
  used_BT = layout.decoder_slots >= 0
  positions_BT, is_vision_BT, counts_BT, engram_rows_BTLR = start_rows(
    (layout.positions, is_vision_BS, counts_BS, layout.engram_rows), start_BT
  )
  encoder = Slots(
    positions_BQ=layout.positions,
    is_vision_BQ=is_vision_BS,
    counts_BQ=counts_BS,
    segment_start_BQ=layout.segment_start,
    entry_begin_BQ=layout.entry_begin,
    entry_end_BQ=layout.entry_end,
    engram_rows_BQLR=layout.engram_rows,
  )
  decoder = Slots(
    positions_BQ=positions_BT,
    is_vision_BQ=is_vision_BT,
    counts_BQ=counts_BT & used_BT,
    segment_start_BQ=layout.decoder_segment_start,
    entry_begin_BQ=layout.decoder_entry_begin,
    entry_end_BQ=layout.decoder_entry_end,
    engram_rows_BQLR=jnp.where(used_BT[..., None, None], engram_rows_BTLR, -1),
  )
  entries = {
    ratio: Entries(
      slots_BNm=slots_BNm,
      positions_BN=jnp.take_along_axis(layout.positions, jnp.maximum(slots_BNm[..., 0], 0), axis=1),
      exists_BN=slots_BNm[..., -1] >= 0,
    )
    for ratio, slots_BNm in layout.entry_slots.items()
  }
  return Surroundings(encoder, decoder, start_BT, entries)


def logits(output: ModelOutput) -> jax.Array:
  """[B, T, V] float32: hidden times output embedding, all of them at once. For short rows."""
  return jnp.einsum(
    "btd,vd->btv", output.hidden_BTD, output.head_VD, precision=jax.lax.Precision.HIGHEST
  )
