"""Arithmetic on a configuration: parameters, activated parameters, model FLOPs, peak rates.

Model FLOPs are what the mathematics asks for: no recomputation, no padding, no softmax, norm or
mHC mixing. A multiplication and the addition after it are two.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from deepseek_jax.config import LayerSpec, ModelConfig
from deepseek_jax.layout import Layout

Mode = Literal["train", "prefill", "decode"]

# Dense bfloat16 FLOP/s by jax.Device.device_kind. Source: the vendors' data sheets. JAX shows an
# Ironwood chip (2307 TFLOP/s) as two devices.
_PEAKS = {
  "NVIDIA H200": 989e12,
  "TPU v5": 459e12,  # v5p; "TPU v5 lite" is another chip
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 2307e12 / 2,
}


@dataclasses.dataclass(frozen=True)
class LayerParameters:
  """Counts of one layer, Engram table excluded."""

  matrices: int  # every token passes through them
  kv_side: int  # compressor and index key matrices, which a decoder source needs for every token
  experts: int  # routed experts, all of them
  active_experts: int  # those of one token
  gains: int  # norms, sink, mHC bases and scales, Engram gains
  router_bias: int


def layer_parameters(cfg: ModelConfig, spec: LayerSpec) -> LayerParameters:
  """Shapes as in model.md section 4."""
  a, i, m, e = cfg.attention, cfg.indexer, cfg.moe, cfg.engram
  coefficients = cfg.streams * (cfg.streams + 2)  # pre, post and combination of one mHC site
  expert = 3 * cfg.dim * m.hidden
  matrices = (
    cfg.dim * (a.q_rank + a.head_dim)
    + a.q_rank * a.heads * a.head_dim
    + a.heads * a.head_dim * a.o_rank
    + a.o_groups * a.o_rank * cfg.dim
    + 2 * coefficients * cfg.streams * cfg.dim
    + cfg.dim * m.experts
    + expert  # the shared one
  )
  gains = a.q_rank + a.head_dim + a.heads + 2 * cfg.dim + 2 * (coefficients + 3)
  kv_side = 0
  if spec.kind == "full":
    kv_side = cfg.dim * a.head_dim * (2 if spec.ratio > 1 else 1) + a.head_dim * i.head_dim
    gains += a.head_dim + i.head_dim
  if spec.kind in ("full", "reindex"):
    matrices += a.q_rank * i.heads * i.head_dim + cfg.dim * i.heads
  if spec.engram is not None:
    matrices += e.lookups * e.head_dim * (cfg.streams + 1) * cfg.dim
    gains += 2 * cfg.streams * cfg.dim
  return LayerParameters(
    matrices=matrices,
    kv_side=kv_side,
    experts=m.experts * expert,
    active_experts=m.experts_per_token * expert,
    gains=gains,
    router_bias=2 * m.experts,  # text and image-span tokens
  )


def parameters(cfg: ModelConfig) -> dict[str, int]:
  """Number of parameters: "backbone" (router biases included), "router_bias", "engram", "total".

  "engram" are the tables; the projections after a lookup are part of the backbone.
  """
  layers = [layer_parameters(cfg, spec) for spec in cfg.schedule()]
  backbone = 2 * cfg.vocab * cfg.dim + cfg.dim
  backbone += sum(p.matrices + p.kv_side + p.experts + p.gains + p.router_bias for p in layers)
  engram = sum(cfg.engram.table_rows) * cfg.engram.head_dim
  return {
    "backbone": backbone,
    "router_bias": sum(p.router_bias for p in layers),
    "engram": engram,
    "total": backbone + engram,
  }


def activated_parameters(cfg: ModelConfig) -> dict[str, int]:
  """Parameters that one token passes through: "prefill" the encoder layers, "decode" all and the
  head; embedding rows and table rows are not counted.
  """
  active = [
    p.matrices + p.kv_side + p.active_experts + p.gains + p.router_bias
    for p in (layer_parameters(cfg, spec) for spec in cfg.schedule())
  ]
  return {
    "prefill": sum(active[: cfg.decoder_start]),
    "decode": sum(active) + cfg.vocab * cfg.dim,
  }


def flops_per_token(cfg: ModelConfig, mode: Mode, context: int) -> float:
  """Model FLOPs for a token, averaged over a row where the tokens differ.

  Args:
    mode: "train" for forward and backward of a row that is one document of `context` tokens,
        6 activated matmul parameters + 3 forward attention + indexer scans
      (choosing entries has no gradient, so scans count once);
      "prefill" for a prompt of `context` tokens whose last window alone enters the decoder;
      "decode" for the token at the end of `context` tokens.
    context: tokens, at least 1.
  """
  seen = np.arange(1, context + 1, dtype=np.int64)  # tokens up to each query, itself included
  if mode == "decode":
    return _forward(cfg, cfg.schedule(), seen[-1:]) + 2 * cfg.vocab * cfg.dim
  if mode == "train":
    return _forward(cfg, cfg.schedule(), seen, backward=True) + 6 * cfg.vocab * cfg.dim
  split = cfg.num_layers if cfg.decoder_start is None else cfg.decoder_start
  encoder, decoder = cfg.schedule()[:split], cfg.schedule()[split:]
  tail = seen[-cfg.attention.window :]
  share = len(tail) / context
  kv_side = sum(layer_parameters(cfg, spec).kv_side for spec in decoder)
  return (
    _forward(cfg, encoder, seen)
    + share * _forward(cfg, decoder, tail, in_segment=seen[: len(tail)])
    + (1 - share) * 2 * kv_side
    + 2 * cfg.vocab * cfg.dim / context  # only the last token's logits
  )


def layout_flops(cfg: ModelConfig, layout: Layout) -> float:
  """Model FLOPs of a training step on these rows, counted as in `flops_per_token`.

  Replay copies count, since they are computed; padding does not. Legend: B rows, S encoder slots,
  T decoder slots.
  """
  split = cfg.num_layers if cfg.decoder_start is None else cfg.decoder_start
  used_BS, used_BT = layout.document >= 0, layout.decoder_slots >= 0
  of_slots = lambda start_BX, used_BX: (np.arange(start_BX.shape[1]) - start_BX + 1)[used_BX]
  seen_BT = np.take_along_axis(layout.positions, np.maximum(layout.decoder_slots, 0), axis=1) + 1
  schedule = cfg.schedule()
  parts = (
    (schedule[:split], layout.positions[used_BS] + 1, of_slots(layout.segment_start, used_BS)),
    (schedule[split:], seen_BT[used_BT], of_slots(layout.decoder_segment_start, used_BT)),
  )
  total = sum(
    len(seen) * _forward(cfg, specs, seen, in_segment=in_segment, backward=True)
    for specs, seen, in_segment in parts
    if len(seen)
  )
  kv_side = sum(layer_parameters(cfg, spec).kv_side for spec in schedule[split:])
  total += 6.0 * kv_side * (used_BS.sum() - used_BT.sum())
  return float(total + 6.0 * cfg.vocab * cfg.dim * used_BT.sum())


def decode_flops_by_precision(cfg: ModelConfig, context: int) -> dict[str, float]:
  """The FLOPs of `flops_per_token(cfg, "decode", context)` by the operands of their products.

  As the release serves (model.md sections 2.7 and 3.5): "fp4" are the indexer's scores; "fp8" the
  linears with FP8 activations, routed experts among them, since a product of FP4 weights with FP8
  activations runs at the FP8 rate (V4 report, introduction); "bf16" all the rest, attention and
  what is in float32 included.
  """
  a, i = cfg.attention, cfg.indexer
  fp8 = 0.0  # matrix parameters
  for spec in cfg.schedule():
    p = layer_parameters(cfg, spec)
    wide = a.heads * a.head_dim * a.o_rank + cfg.dim * cfg.moe.experts + p.kv_side
    wide += 2 * cfg.streams * (cfg.streams + 2) * cfg.streams * cfg.dim  # mHC coefficients
    if spec.kind in ("full", "reindex"):
      wide += cfg.dim * i.heads
    fp8 += p.matrices + p.kv_side + p.active_experts - wide
  total = flops_per_token(cfg, "decode", context)
  scanned = sum(int(scanned_entries(cfg, spec, context)) for spec in cfg.schedule())
  fp4 = 2.0 * i.heads * i.head_dim * scanned
  return {"bf16": total - fp4 - 2 * fp8, "fp8": 2 * fp8, "fp4": fp4}


def scanned_entries(cfg: ModelConfig, spec: LayerSpec, seen: Any) -> Any:
  """Entries that a layer's indexer scores for a query; 0 for a layer without one.

  seen: tokens up to the query, itself included; an integer or an array of them.
  """
  if spec.kind not in ("full", "reindex"):
    return 0 * seen
  visible, pool = seen // spec.ratio, cfg.indexer.pool_blocks * cfg.indexer.pool_block_size
  return np.minimum(visible, pool) if spec.pool == "restrict" else visible


def peak_flops(device_kind: str) -> float | None:
  """Dense bfloat16 FLOP/s of a device of this kind; None where it is not known, as for a CPU."""
  return _PEAKS.get(device_kind)


def _forward(
  cfg: ModelConfig,
  specs: Iterable[LayerSpec],
  seen: np.ndarray,
  *,
  in_segment: np.ndarray | None = None,
  backward: bool = False,
) -> float:
  """FLOPs of some layers, the mean over queries.

  seen: for each query, how many tokens of its document it comes after, plus itself; in_segment:
  the same in the segment that the window stays in, where that is shorter than the document.
  """
  a, i = cfg.attention, cfg.indexer
  passes = 3 if backward else 1  # the backward pass costs two forward passes
  window = np.minimum(seen if in_segment is None else in_segment, a.window)
  total = 0.0
  for spec in specs:
    p = layer_parameters(cfg, spec)
    total += passes * 2.0 * (p.matrices + p.kv_side + p.active_experts)
    visible = seen // spec.ratio if spec.ratio else np.zeros_like(seen)
    keys = window + np.minimum(visible, i.top_k)
    total += passes * 4.0 * a.heads * a.head_dim * keys.mean()  # q . k and p v
    total += 2.0 * i.heads * i.head_dim * scanned_entries(cfg, spec, seen).mean()
  return float(total)
