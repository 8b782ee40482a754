"""Released names and layouts <-> our parameter tree (model.md section 4).

Released matrices are [out, in]; ours are [in, out], with heads, groups and streams as axes of their
own. `released` below holds `{layer}` and `{expert}` where our tree has a layer or an expert axis.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.config import (
  AttentionConfig,
  EngramConfig,
  IndexerConfig,
  ModelConfig,
  MoeConfig,
  RopeConfig,
)
from deepseek_jax.ops import number_formats as formats

# How a released array becomes ours: "same" reshapes it, "transpose" first turns it to [in, out],
# "groups" turns [groups * out, in] to [groups, in, out], "experts" stacks one transpose per expert,
# "table" is followed by the zero rows that ours ends with.
Turn = Literal["same", "transpose", "groups", "experts", "table"]

_ATTENTION: dict[str, tuple[str, Turn]] = {
  "attn/wq_a": ("attn.wq_a.weight", "transpose"),
  "attn/q_norm": ("attn.q_norm.weight", "same"),
  "attn/wq_b": ("attn.wq_b.weight", "transpose"),
  "attn/wkv": ("attn.wkv.weight", "transpose"),
  "attn/kv_norm": ("attn.kv_norm.weight", "same"),
  "attn/wo_a": ("attn.wo_a.weight", "groups"),
  "attn/wo_b": ("attn.wo_b.weight", "transpose"),
  "attn/sink": ("attn.attn_sink", "same"),
  "attn_norm": ("attn_norm.weight", "same"),
  "ffn_norm": ("ffn_norm.weight", "same"),
  "attn/compressor/wkv": ("attn.compressor.wkv.weight", "transpose"),
  "attn/compressor/wgate": ("attn.compressor.wgate.weight", "transpose"),
  "attn/compressor/norm": ("attn.compressor.norm.weight", "same"),
  "attn/indexer/wq_b": ("attn.indexer.wq_b.weight", "transpose"),
  "attn/indexer/weights_proj": ("attn.indexer.weights_proj.weight", "transpose"),
  "attn/indexer/wk": ("attn.indexer.wk.weight", "transpose"),
  "attn/indexer/k_norm": ("attn.indexer.k_norm.weight", "same"),
}
_HYPER: dict[str, tuple[str, Turn]] = {
  f"hc_{site}/{part}": (f"hc_{site}_{part}", "same")
  for site in ("attn", "ffn")
  for part in ("fn", "base", "scale")
}
_MOE: dict[str, tuple[str, Turn]] = {
  "moe/gate": ("ffn.gate.weight", "transpose"),
  "moe/bias": ("ffn.gate.bias", "same"),
  "moe/bias_vl": ("ffn.gate.bias_vl", "same"),
  **{
    f"moe/experts/{w}": (f"ffn.experts.{{expert}}.{w}.weight", "experts")
    for w in ("w1", "w2", "w3")
  },
  **{
    f"moe/shared/{w}": (f"ffn.shared_experts.{w}.weight", "transpose") for w in ("w1", "w2", "w3")
  },
}
_ENGRAM: dict[str, tuple[str, Turn]] = {
  "engram/table": ("engram.embed.weight", "table"),
  "engram/wkv": ("engram.wkv.weight", "transpose"),
  "engram/q_weight": ("engram.q_weight", "same"),
  "engram/k_weight": ("engram.k_weight", "same"),
}
_LAYER = {**_ATTENTION, **_HYPER, **_MOE, **_ENGRAM}
_GLOBAL: dict[str, tuple[str, Turn]] = {
  "embed": ("embed.weight", "same"),
  "head": ("head.weight", "same"),
  "norm": ("norm.weight", "same"),
}


@dataclasses.dataclass(frozen=True)
class ReleasedParameter:
  """One of our parameters and the released tensors it is made of."""

  path: str  # "layer_3/attn/wq_a"
  names: tuple[str, ...]
  turn: Turn


def released_parameter(path: str, shape: tuple[int, ...]) -> ReleasedParameter:
  """The released tensors behind our parameter; KeyError if the table does not know the path."""
  if path in _GLOBAL:
    name, turn = _GLOBAL[path]
    return ReleasedParameter(path, (name,), turn)
  layer, rest = path.removeprefix("layer_").split("/", 1)
  name, turn = _LAYER[rest]
  name = f"layers.{layer}.{name}"
  names = tuple(name.format(expert=e) for e in range(shape[0])) if turn == "experts" else (name,)
  return ReleasedParameter(path, names, turn)


def dequantize(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """A stored tensor and its power-of-two scales -> float32 values.

  FP8 [out, in] with a scale per 32 x 32 tile (the last tile may be cut), packed FP4 [out, in / 2]
  or FP8 rows with a scale per 32 inputs. Source: model.md section 3.6.
  """
  if weight.dtype == np.int8:
    values = np.asarray(formats.unpack_e2m1(jnp.asarray(weight.view(np.uint8))))
  else:
    values = weight.astype(np.float32)
  scales = np.asarray(formats.decode_e8m0(jnp.asarray(scale.view(np.uint8))))
  for axis in range(2):
    if scales.shape[axis] != values.shape[axis]:
      scales = np.repeat(scales, 32, axis=axis).take(range(values.shape[axis]), axis=axis)
  return values * scales


def load_released(
  tensors: Mapping[str, np.ndarray],
  abstract: Any,
  engram: EngramConfig,
  *,
  ignore: tuple[str, ...] = (),
) -> Any:
  """Released tensors -> a tree like `abstract` (unrolled layers), float32.

  Args:
    tensors: by released name; `X.scale` beside a quantized `X.weight`.
    abstract: {"params": ..., "balance": ...} of shapes, from eval_shape with scan_layers=False.
    engram: says how many rows each table has.
    ignore: name prefixes that may stay unused.

  Raises: ValueError that lists every missing, unused and misshapen tensor.
  """
  problems: list[str] = []
  unused = {name for name in tensors if not name.startswith(ignore)} if ignore else set(tensors)

  def one(name: str) -> np.ndarray | None:
    unused.discard(name)
    if name not in tensors:
      problems.append(f"missing tensor {name}")
      return None
    scale_name = name.removesuffix(".weight") + ".scale"
    if scale_name not in tensors:
      return tensors[name].astype(np.float32)
    unused.discard(scale_name)
    return dequantize(tensors[name], tensors[scale_name])

  def leaf(key_path, target) -> np.ndarray:
    path = "/".join(key.key for key in key_path[1:])
    entry = released_parameter(path, target.shape)
    arrays = [array for name in entry.names if (array := one(name)) is not None]
    if len(arrays) < len(entry.names):
      return np.zeros(target.shape, np.float32)
    shape = _table_shape(path, engram) if entry.turn == "table" else target.shape
    try:
      ours = _turned(entry.turn, arrays, shape)
    except ValueError:
      found = arrays[0].shape
      problems.append(f"misshapen tensor {entry.names[0]}: {found} does not fit {shape}")
      return np.zeros(target.shape, np.float32)
    return _grown(ours, target.shape)

  tree = jax.tree_util.tree_map_with_path(leaf, abstract)
  problems += [f"unused tensor {name}" for name in sorted(unused)]
  if problems:
    raise ValueError("; ".join(problems) + ".")
  return tree


def _turned(turn: Turn, arrays, shape) -> np.ndarray:
  first = arrays[0]
  if turn == "experts":
    return np.stack([_exactly(array.T, shape[1:]) for array in arrays])
  if turn == "groups":
    groups, width, rank = shape
    return _exactly(first, (groups * rank, width)).reshape(groups, rank, width).swapaxes(1, 2)
  if turn == "transpose":
    return _exactly(first.T, (shape[0], int(np.prod(shape[1:])))).reshape(shape)
  flat = (shape[0], int(np.prod(shape[1:]))) if first.ndim == 2 and len(shape) == 3 else shape
  return _exactly(first, flat).reshape(shape)


def _table_shape(path: str, engram: EngramConfig) -> tuple[int, int]:
  layer = int(path.removeprefix("layer_").split("/", 1)[0])
  return engram.table_rows[engram.layers.index(layer)], engram.head_dim


def _grown(array: np.ndarray, shape) -> np.ndarray:
  """The array followed by zeros; itself where it has the shape already."""
  if array.shape == tuple(shape):
    return array
  return np.pad(array, [(0, to - of) for to, of in zip(shape, array.shape, strict=True)])


def _exactly(array: np.ndarray, shape) -> np.ndarray:
  if array.shape != tuple(shape):
    raise ValueError(f"{array.shape} is not {shape}")
  return array


def released_config(values: Mapping[str, Any], **changes: Any) -> ModelConfig:
  """A released config.json -> ModelConfig. The decoder starts at the ratio-1 KV source.

  Raises: ValueError naming a key that is missing.
  """
  text = values.get("text_config", values)
  try:
    config = _config(text)
  except KeyError as error:
    raise ValueError(f"config.json lacks the key {error}.") from None
  return dataclasses.replace(config, **changes)


def _config(text: Mapping[str, Any]) -> ModelConfig:
  ratios = tuple(text["compress_ratios"][: text["num_hidden_layers"]])
  sources = tuple(text["kv_source_layer_ids"])
  decoders = [layer for layer in sources if set(ratios[layer:]) == {1}]
  scaling, pool = text["rope_scaling"], text["candidate_source_layer_id"]
  return ModelConfig(
    vocab=text["vocab_size"],
    dim=text["hidden_size"],
    streams=text["hc_mult"],
    compress_ratios=ratios,
    kv_sources=sources,
    index_sources=tuple(text["index_source_layer_ids"]),
    decoder_start=decoders[0] if len(decoders) == 1 else None,
    norm_eps=text["rms_norm_eps"],
    sinkhorn_iterations=text["hc_sinkhorn_iters"],
    hc_eps=text["hc_eps"],
    attention=AttentionConfig(
      heads=text["num_attention_heads"],
      head_dim=text["head_dim"],
      rope_dim=text["qk_rope_head_dim"],
      q_rank=text["q_lora_rank"],
      o_rank=text["o_lora_rank"],
      o_groups=text["o_groups"],
      window=text["sliding_window"],
    ),
    rope=RopeConfig(
      theta=text["rope_theta"],
      compress_theta=text["compress_rope_theta"],
      yarn_factor=scaling["factor"],
      yarn_beta_fast=scaling["beta_fast"],
      yarn_beta_slow=scaling["beta_slow"],
      yarn_original_length=scaling["original_max_position_embeddings"],
    ),
    indexer=IndexerConfig(
      heads=text["index_n_heads"],
      head_dim=text["index_head_dim"],
      top_k=text["index_topk"],
      pool_source=None if pool < 0 else pool,
      pool_blocks=max(1, text["candidate_topk_blocks"]),  # 0 in files without a pool
      pool_block_size=max(1, text["candidate_block_size"]),
    ),
    moe=MoeConfig(
      experts=text["n_routed_experts"],
      experts_per_token=text["num_experts_per_tok"],
      hidden=text["moe_intermediate_size"],
      route_scale=text["routed_scaling_factor"],
      limit=text["swiglu_limit"],
    ),
    engram=EngramConfig(
      layers=tuple(text["engram_layer_ids"]),
      table_rows=tuple(text["engram_num_embeddings"]),
      max_ngram=text["engram_max_ngram_size"],
      heads=text["engram_n_heads"],
      head_dim=text["engram_head_dim"],
      prime_start=text["engram_vocab_size"],
      # The release's own key first, then the one of the transformers port.
      pad_token=text.get("engram_pad_token_id", text.get("engram_pad_id")),
      compressed_vocab=text["engram_compressed_vocab_size"],
    ),
  )
