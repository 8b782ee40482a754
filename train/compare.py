"""How far our traces are from recorded ones, and which of them a bound applies to.

Legend: B rows, S tokens, K chosen entries, V vocabulary.
"""

import dataclasses

import numpy as np

# Largest error over the largest magnitude of the tensor (docs/design.md section 5).
BOUNDS = {"fp32": 2e-5, "fp32_qat": 2e-5, "fp32_actqat": 2e-5, "bf16": 2e-2}
NOT_TRACES = ("input_ids", "token_types", "images.")

# What each site of a layer is computed from: recorded inputs make a site comparable in bfloat16.
# "before" is the stream that enters the layer, "source"/"index" the layer that owns entries/choice.
_MIDDLE = ("before.streams", "attn.out", "hc_attn.post", "hc_attn.comb")
SITES: dict[str, tuple[str, ...]] = {
  "engram.gate": ("engram_before.streams", "engram.rows"),
  "engram.value": ("engram.rows",),
  "engram.out": ("engram_before.streams", "engram.gate", "engram.value"),
  "engram.rows": (),
  "hc_attn.pre": ("before.streams",),
  "hc_attn.post": ("before.streams",),
  "hc_attn.comb": ("before.streams",),
  "attn_in": ("before.streams", "before.hc_ffn.pre"),
  "attn.qr": ("attn_in",),
  "attn.q": ("attn.qr",),
  "attn.window_kv": ("attn_in",),
  "attn.latent": ("attn_in",),
  "attn.compressed_kv": ("attn.latent",),
  "indexer.k": ("attn.latent",),
  "indexer.q": ("attn.qr",),
  "indexer.head_weights": ("attn_in",),
  "indexer.scores": ("indexer.q", "source.indexer.k", "indexer.head_weights"),
  "indexer.topk": ("indexer.q", "source.indexer.k", "indexer.head_weights"),
  "indexer.candidates": ("indexer.q", "source.indexer.k", "indexer.head_weights"),
  "attn.o": ("attn.q", "attn.window_kv", "source.attn.compressed_kv", "index.indexer.topk"),
  "attn.out": ("attn.o",),
  "hc_ffn.pre": _MIDDLE,
  "hc_ffn.post": _MIDDLE,
  "hc_ffn.comb": _MIDDLE,
  "ffn_in": (*_MIDDLE, "hc_attn.pre"),
  "ffn.router_experts": ("ffn_in",),
  "ffn.router_weights": ("ffn_in",),
  "ffn.out": ("ffn_in", "ffn.router_experts", "ffn.router_weights"),
  "streams": (*_MIDDLE, "ffn.out", "hc_ffn.post", "hc_ffn.comb"),
}


@dataclasses.dataclass(frozen=True)
class Difference:
  """One trace: floats have an error, integers and booleans are identical or not."""

  name: str
  max_abs: float
  relative: float
  identical: bool
  is_integer: bool
  held_to: float | None  # bound on `relative`; None: reported only

  @property
  def fails(self) -> bool:
    if self.held_to is None:
      return False
    return not self.identical if self.is_integer else not self.relative <= self.held_to


def compare(name: str, ours: np.ndarray, recorded: np.ndarray, held_to: float | None):
  """Difference of two arrays; places that are not finite must agree."""
  is_integer = recorded.dtype.kind in "ibu"
  if name.endswith(".topk"):
    ours, recorded = same_width(ours), same_width(recorded)
    width = max(ours.shape[-1], recorded.shape[-1])
    ours, recorded = (same_width(x, width) for x in (ours, recorded))
  if ours.shape != recorded.shape:
    return Difference(name, np.inf, np.inf, False, is_integer, held_to)
  a, b = ours.astype(np.float64), recorded.astype(np.float64)
  finite = np.isfinite(b)
  identical = bool(np.array_equal(a, b, equal_nan=True))
  if not np.array_equal(finite, np.isfinite(a)):
    return Difference(name, np.inf, np.inf, False, is_integer, held_to)
  a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
  error = float(np.max(np.abs(a - b), initial=0.0))
  largest = float(np.max(np.abs(b), initial=0.0))
  relative = error / largest if largest else (0.0 if error == 0.0 else np.inf)
  return Difference(name, error, relative, identical, is_integer, held_to)


def same_width(ids_BSK: np.ndarray, width: int = 0) -> np.ndarray:
  """Choices are -1 at the end, so their number may differ by padding alone."""
  grow = max(0, width - ids_BSK.shape[-1])
  return np.pad(ids_BSK, [(0, 0)] * (ids_BSK.ndim - 1) + [(0, grow)], constant_values=-1)


def inputs_of(name: str, cfg) -> tuple[str, ...] | None:
  """Traces that a trace is computed from; None if this table does not know it."""
  schedule = cfg.schedule()
  if name == "embed_out":
    return ()
  if name == "final_hidden":
    last = schedule[-1].layer
    return (f"layers.{last}.streams", f"layers.{last}.hc_ffn.pre")
  if name == "logits":
    return ("final_hidden",)
  _, number, site = name.split(".", 2)
  spec = schedule[int(number)]
  if site not in SITES:
    return None

  def stream_before(after_engram: bool) -> str:
    if spec.engram is not None and after_engram:
      return f"layers.{spec.layer}.engram.out"
    return f"layers.{spec.layer - 1}.streams" if spec.layer else "embed_out"

  def resolve(item: str) -> tuple[str, ...]:
    owner, _, rest = item.partition(".")
    match owner:
      case "engram_before":
        return (stream_before(after_engram=False),)
      case "before" if rest == "streams":
        return (stream_before(after_engram=True),)
      case "before":  # the first layer's coefficients are constant
        return (f"layers.{spec.layer - 1}.{rest}",) if spec.layer else ()
      case "source":
        return () if spec.kv_source is None else (f"layers.{spec.kv_source}.{rest}",)
      case "index":
        return () if spec.index_source is None else (f"layers.{spec.index_source}.{rest}",)
    return (f"layers.{spec.layer}.{item}",)

  return tuple(name for item in SITES[site] for name in resolve(item))


def logit_agreement(ours_BSV: np.ndarray, recorded_BSV: np.ndarray) -> dict[str, float]:
  """Mean and 95th percentile of KL(recorded || ours) in nats, cosine, share of equal top-1."""
  log_p, log_q = _log_softmax(recorded_BSV), _log_softmax(ours_BSV)
  kl_BS = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
  a, b = ours_BSV.astype(np.float64).ravel(), recorded_BSV.astype(np.float64).ravel()
  return {
    "mean_kl": float(kl_BS.mean()),
    "p95_kl": float(np.quantile(kl_BS, 0.95)),
    "cosine": float(a @ b / np.sqrt((a @ a) * (b @ b))),
    "top1": float(np.mean(ours_BSV.argmax(-1) == recorded_BSV.argmax(-1))),
  }


def _log_softmax(x_BSV: np.ndarray) -> np.ndarray:
  x_BSV = x_BSV.astype(np.float64)
  x_BSV = x_BSV - x_BSV.max(-1, keepdims=True)
  return x_BSV - np.log(np.exp(x_BSV).sum(-1, keepdims=True))
