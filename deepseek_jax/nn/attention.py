"""Attention of one layer: a window of its own, and compressed entries that layers may share.

Legend: B rows, S encoder slots, Q slots of the queries, N entry cells, H heads, d head width,
D width, r query rank, G output groups, g head channels of a group, o output rank.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from deepseek_jax.config import LayerSpec, ModelConfig
from deepseek_jax.nn import parameters
from deepseek_jax.nn.compressor import Compressor
from deepseek_jax.nn.health import report
from deepseek_jax.nn.indexer import Indexer
from deepseek_jax.nn.linear import fp8_input
from deepseek_jax.ops.attention_mass import Choice, Queries, attention_mass
from deepseek_jax.ops.indexer import Teacher
from deepseek_jax.ops.matmul import dot
from deepseek_jax.ops.quantize import fake_fp8, fake_main
from deepseek_jax.ops.rms_norm import rms_norm
from deepseek_jax.ops.rope import frequencies, rotate
from deepseek_jax.ops.sparse_attention import plan_selection, sparse_attention
from deepseek_jax.sharding import constrain
from deepseek_jax.training_config import IndexerLoss
from deepseek_jax.types import Entries, LayerCarry, Slots, Tap, no_tap

# Choosing again in the backward pass would cost as much as the attention itself, and the layers
# that share a choice keep it anyway. What teaches the indexer is as small.
SELECTION = "selection"


class Projected(NamedTuple):
  """Of every slot, in the compute dtype."""

  qr_BQr: jax.Array  # normalized query latent
  q_BQHd: jax.Array  # rotated queries
  kv_BQd: jax.Array  # rotated key and value of the window, before quantization


class Attention(nn.Module):
  """Low-rank queries, one shared key-value head, grouped low-rank output (model.md section 2.4)."""

  cfg: ModelConfig
  spec: LayerSpec
  indexer_loss: IndexerLoss = "off"
  observed_queries: int = 0
  tap: Tap = no_tap

  def setup(self):
    cfg, spec, a = self.cfg, self.spec, self.cfg.attention
    matrix = parameters.normal(cfg.init_std)
    declare = lambda name, shape, axes: parameters.declare(self, name, matrix, shape, axes)
    gain = lambda name, size: parameters.declare(self, name, parameters.ones, (size,), (None,))
    group = a.heads // a.o_groups * a.head_dim
    self.wq_a = declare("wq_a", (cfg.dim, a.q_rank), ("embed", None))
    self.q_norm = gain("q_norm", a.q_rank)
    self.wq_b = declare("wq_b", (a.q_rank, a.heads, a.head_dim), ("embed", "heads", None))
    self.wkv = declare("wkv", (cfg.dim, a.head_dim), ("embed", None))
    self.kv_norm = gain("kv_norm", a.head_dim)
    self.wo_a = declare("wo_a", (a.o_groups, group, a.o_rank), ("heads", "embed", None))
    self.wo_b = declare("wo_b", (a.o_groups * a.o_rank, cfg.dim), ("heads", "embed"))
    self.sink = parameters.declare(self, "sink", parameters.zeros, (a.heads,), ("heads",))
    if spec.kind == "full":
      self.compressor = Compressor(cfg, spec.ratio)
    if spec.kind in ("full", "reindex"):
      self.indexer = Indexer(cfg, spec, self.tap)
    self.frequency = frequencies(cfg.rope, a.rope_dim, compressed=spec.ratio > 0)

  def compress(self, x_BSD: jax.Array, entries: Entries, carry: LayerCarry) -> LayerCarry:
    """A KV source's entries and indexer keys, from the encoder slots' input."""
    kv_BNd, keys_BNi = self.entries(self.compressor(x_BSD, entries), entries)
    kv_BNd = fake_main(kv_BNd) if self.cfg.numerics.main_fp4 else kv_BNd
    kv_BNd = self.tap("attn.compressed_kv", kv_BNd)
    # Whole on every device of a context group: they are small, and any query may choose any.
    whole = lambda x_BN: constrain(x_BN, "batch", None, None)
    return carry._replace(shared_kv_BNd=whole(kv_BNd), index_keys_BNi=whole(keys_BNi))

  def entries(self, latent_BNd: jax.Array, entries: Entries) -> tuple[jax.Array, jax.Array]:
    """Rotated entries [B, N, d] and indexer keys [B, N, i] of latents, before quantization."""
    latent_BNd = self.tap("attn.latent", latent_BNd)
    kv_BNd = rotate(latent_BNd, entries.positions_BN, self.frequency)
    return kv_BNd, self.indexer.keys(latent_BNd, entries)

  def project(self, x_BQD: jax.Array, slots: Slots) -> Projected:
    """What the slots ask with, and what they are to later ones."""
    cfg = self.cfg
    input_BQD = fp8_input(x_BQD, cfg.numerics)
    qr_BQr = rms_norm(dot("bqd,dr->bqr", input_BQD, self.wq_a), self.q_norm, eps=cfg.norm_eps)
    qr_BQr = self.tap("attn.qr", qr_BQr)
    q_BQHd = dot("bqr,rhd->bqhd", fp8_input(qr_BQr, cfg.numerics), self.wq_b)
    q_BQHd = self.tap("attn.q", rotate(q_BQHd, slots.positions_BQ, self.frequency))
    kv_BQd = rms_norm(dot("bqd,de->bqe", input_BQD, self.wkv), self.kv_norm, eps=cfg.norm_eps)
    return Projected(qr_BQr, q_BQHd, rotate(kv_BQd, slots.positions_BQ, self.frequency))

  def __call__(
    self, x_BQD: jax.Array, slots: Slots, entries: dict[int, Entries], carry: LayerCarry
  ) -> tuple[jax.Array, LayerCarry, jax.Array]:
    """Returns the output [B, Q, D], the carry with a new choice, and the indexer's KL sum."""
    cfg, spec, a = self.cfg, self.spec, self.cfg.attention
    qr_BQr, q_BQHd, kv_BQd = self.project(x_BQD, slots)
    kv_BQd = fake_fp8(kv_BQd) if cfg.numerics.window_fp8 else kv_BQd
    kv_BQd = self.tap("attn.window_kv", kv_BQd)

    chooses = spec.kind in ("full", "reindex")
    learns_from = self.indexer_loss if chooses else "off"
    if chooses:
      index_q, index_weights = self.indexer.queries(x_BQD, qr_BQr, slots)
      carry = self.indexer.select(index_q, index_weights, slots, entries[spec.ratio], carry)
      plan = plan_selection(carry.selection_BQK, carry.shared_kv_BNd, q_BQHd, window=a.window)
      selection_BQK, plan, pool_BQW = checkpoint_name(
        (carry.selection_BQK, plan, carry.pool_BQW), SELECTION
      )
      carry = carry._replace(selection_BQK=selection_BQK, selection_plan=plan, pool_BQW=pool_BQW)
    attended = sparse_attention(
      q_BQHd,
      kv_BQd,
      carry.shared_kv_BNd if spec.ratio else None,
      carry.selection_BQK if spec.ratio else None,
      slots.segment_start_BQ,
      self.sink,
      window=a.window,
      plan=carry.selection_plan if spec.ratio else None,
      with_teacher=learns_from == "sparse",
    )
    if self.observed_queries:
      self._report(q_BQHd, kv_BQd, slots, entries, carry)
    kl = jnp.zeros((), jnp.float32)
    if learns_from == "sparse":
      teacher_BQK = checkpoint_name(attended.teacher_BQK, SELECTION)
      kl = self.indexer.divergence(
        index_q, index_weights, carry.selection_BQK, teacher_BQK, slots, carry
      )
    elif learns_from == "dense":
      lse_BQH = checkpoint_name(attended.lse_BQH, SELECTION)
      teacher = Teacher(q_BQHd, lse_BQH, carry.selection_BQK)
      kl = self.indexer.dense_divergence(
        index_q, index_weights, teacher, slots, entries[spec.ratio], carry
      )
    return self.output(attended.out_BQHd, slots), carry, kl

  def _report(self, q_BQHd, kv_BQd, slots: Slots, entries, carry: LayerCarry) -> None:
    """Where attention goes, and what of it the indexer's choice would catch."""
    queries = Queries(q_BQHd, kv_BQd, slots.segment_start_BQ, slots.counts_BQ)
    kv_BNd = exists_BN = None
    if ratio := self.spec.ratio:
      kv_BNd, exists_BN = carry.shared_kv_BNd, entries[ratio].exists_BN
      begin, end = slots.entry_begin_BQ[ratio], slots.entry_end_BQ[ratio]
      choice = Choice(carry.selection_BQK, begin, end, carry.pool_BQW)
      queries = queries._replace(choice=choice)
    mass = attention_mass(
      queries,
      kv_BNd,
      exists_BN,
      self.sink,
      window=self.cfg.attention.window,
      samples=self.observed_queries,
      pool_block_size=self.cfg.indexer.pool_block_size,
    )
    report(self, "sink_mass", mass.sink, mass.queries)
    report(self, "window_mass", mass.window, mass.queries)
    report(self, "largest_logit", mass.largest_logit, 1)
    if ratio:
      report(self, "recall", mass.recall, mass.seeing)
      if carry.pool_BQW is not None:
        report(self, "pool_recall", mass.pool_recall, mass.seeing)

  def output(self, o_BQHd: jax.Array, slots: Slots) -> jax.Array:
    """[B, Q, D]: what the heads found, turned back to the queries' positions."""
    cfg = self.cfg
    o_BQHd = rotate(o_BQHd, slots.positions_BQ, self.frequency, inverse=True)
    o_BQHd = self.tap("attn.o", o_BQHd)
    grouped_BQGg = o_BQHd.reshape(*o_BQHd.shape[:2], cfg.attention.o_groups, -1)
    latent_BQGo = dot("bqgd,gdo->bqgo", grouped_BQGg, self.wo_a)
    latent = latent_BQGo.reshape(*latent_BQGo.shape[:2], -1)
    return self.tap("attn.out", dot("bqo,od->bqd", fp8_input(latent, cfg.numerics), self.wo_b))
