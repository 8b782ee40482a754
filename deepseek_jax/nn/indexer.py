"""The parameters of an indexer, and what it publishes: a choice of entries, and perhaps a pool.

Legend: B rows, Q slots, N entry cells, K chosen entries, W pool blocks, I indexer heads, i indexer
width, d head width, D width, r query rank.
"""

import jax
from flax import linen as nn

from deepseek_jax.config import LayerSpec, ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.linear import fp8_input
from deepseek_jax.ops import indexer as op
from deepseek_jax.ops.matmul import dot
from deepseek_jax.ops.quantize import fake_indexer
from deepseek_jax.ops.rms_norm import rms_norm
from deepseek_jax.ops.rope import frequencies, rotate
from deepseek_jax.types import Entries, LayerCarry, Slots, Tap, no_tap


class Indexer(nn.Module):
  """Chooses the entries that a group of layers attends to (model.md section 2.6).

  Its inputs are detached: the language-model loss does not reach it, its own loss nothing else.
  """

  cfg: ModelConfig
  spec: LayerSpec
  tap: Tap = no_tap

  def setup(self):
    cfg, size, rank = self.cfg, self.cfg.indexer, self.cfg.attention.q_rank
    matrix = parameters.normal(cfg.init_std)
    self.wq_b = parameters.declare(
      self, "wq_b", matrix, (rank, size.heads, size.head_dim), ("embed", "heads", None)
    )
    self.weights_proj = parameters.declare(
      self, "weights_proj", matrix, (cfg.dim, size.heads), ("embed", None)
    )
    if self.spec.kind == "full":
      self.wk = parameters.declare(
        self, "wk", matrix, (cfg.attention.head_dim, size.head_dim), (None, None)
      )
      self.k_norm = parameters.declare(self, "k_norm", parameters.ones, (size.head_dim,), (None,))
    self.frequency = frequencies(cfg.rope, cfg.attention.rope_dim, compressed=True)

  def keys(self, latent_BNd: jax.Array, entries: Entries) -> jax.Array:
    """[B, N, i] rotated keys, before fake quantization."""
    key_BNi = dot("bnd,di->bni", jax.lax.stop_gradient(latent_BNd), self.wk)
    key_BNi = rms_norm(key_BNi, self.k_norm, eps=self.cfg.norm_eps)
    return rotate(key_BNi, entries.positions_BN, self.frequency)

  def queries(self, x_BQD: jax.Array, qr_BQr: jax.Array, slots: Slots):
    """Rotated queries [B, Q, I, i] before fake quantization, and scaled head weights [B, Q, I]."""
    size = self.cfg.indexer
    qr_BQr = fp8_input(jax.lax.stop_gradient(qr_BQr), self.cfg.numerics)
    q_BQIi = dot("bqr,rji->bqji", qr_BQr, self.wq_b)
    weights_BQI = dot("bqd,dj->bqj", jax.lax.stop_gradient(x_BQD), self.weights_proj)
    scale = size.head_dim**-0.5 * size.heads**-0.5
    return rotate(q_BQIi, slots.positions_BQ, self.frequency), weights_BQI * scale

  def quantized(self, x: jax.Array) -> jax.Array:
    return fake_indexer(x) if self.cfg.numerics.indexer_fp4 else x

  def select(self, q_BQIi, weights_BQI, slots: Slots, entries: Entries, carry: LayerCarry):
    """Returns carry with the new selection, and with the pool where this layer publishes one."""
    keys_BNi = self.tap("indexer.k", self.quantized(carry.index_keys_BNi))
    visible = self._visible(slots, entries)
    chosen = self.choose(q_BQIi, weights_BQI, keys_BNi, visible, self._pool(carry))
    carry = carry._replace(selection_BQK=chosen.selection_BQK)
    return carry if chosen.pool_BQW is None else carry._replace(pool_BQW=chosen.pool_BQW)

  def choose(self, q_BQIi, weights_BQI, keys_BNi, visible: op.Visible, pool_BQW) -> op.Selected:
    """The best visible entries, inside the pool if there is one; keys are quantized already."""
    size = self.cfg.indexer
    choice = op.Choice(
      top_k=size.top_k,
      publish_blocks=size.pool_blocks if self.spec.pool == "publish" else 0,
      block_size=size.pool_block_size,
      scores_bf16=self.cfg.numerics.scores_bf16,
    )
    selected = op.select(
      self.tap("indexer.q", self.quantized(q_BQIi)),
      keys_BNi,
      self.tap("indexer.head_weights", weights_BQI),
      visible,
      choice,
      pool_BQW=pool_BQW,
      with_scores=self.tap is not no_tap,
    )
    if selected.scores_BQN is not None:
      self.tap("indexer.scores", selected.scores_BQN)
    if selected.pool_BQW is not None:
      selected = selected._replace(pool_BQW=self.tap("indexer.pool", selected.pool_BQW))
    return selected._replace(selection_BQK=self.tap("indexer.topk", selected.selection_BQK))

  def divergence(self, q_BQIi, weights_BQI, selection_BQK, teacher_BQK, slots, carry) -> jax.Array:
    """Sum over counting queries of the KL that trains this indexer, float32."""
    return op.divergence(
      q_BQIi, carry.index_keys_BNi, weights_BQI, selection_BQK, teacher_BQK, slots.counts_BQ
    )

  def dense_divergence(self, q_BQIi, weights_BQI, teacher, slots, entries, carry) -> jax.Array:
    """The same on all entries that this layer may choose, not only those that it chose."""
    return op.dense_divergence(
      q_BQIi,
      carry.index_keys_BNi,
      weights_BQI,
      teacher,
      carry.shared_kv_BNd,
      self._visible(slots, entries),
      slots.counts_BQ,
      pool_BQW=self._pool(carry),
      block_size=self.cfg.indexer.pool_block_size,
    )

  def _visible(self, slots: Slots, entries: Entries) -> op.Visible:
    ratio = self.spec.ratio
    return op.Visible(entries.exists_BN, slots.entry_begin_BQ[ratio], slots.entry_end_BQ[ratio])

  def _pool(self, carry: LayerCarry) -> jax.Array | None:
    """The blocks that this layer is held to."""
    return carry.pool_BQW if self.spec.pool == "restrict" else None
