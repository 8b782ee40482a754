"""config.json of a released checkpoint <-> ModelConfig (model.md section 1)."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from deepseek_jax.checkpoint.safetensors_file import unique_keys
from deepseek_jax.config import (
  AttentionConfig,
  EngramConfig,
  IndexerConfig,
  ModelConfig,
  MoeConfig,
  RopeConfig,
)


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


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """config.json of a folder. Raises ValueError where it is missing or no JSON object."""
  path = folder / "config.json"
  try:
    values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
  except OSError as error:
    raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is no JSON: {error}.") from None
  if not isinstance(values, dict):
    raise ValueError(f"{path} holds no JSON object.")
  return values


# What a release states besides the sizes; nothing here depends on them.
_FIXED = {
  "architectures": ["DeepseekV41ForCausalLM"],
  "model_type": "deepseek_v41",
  "dtype": "bfloat16",
  "bos_token_id": 0,
  "eos_token_id": 1,
  "pad_token_id": 2,
}
_FIXED_TEXT = {
  "model_type": "deepseek_v41_text",
  "num_key_value_heads": 1,
  "attention_bias": False,
  "attention_dropout": 0.0,
  "n_shared_experts": 1,
  "scoring_func": "sqrtsoftplus",
  "topk_method": "noaux_tc",
  "norm_topk_prob": True,
  "hidden_act": "silu",
  "tie_word_embeddings": False,
  "max_position_embeddings": 1048576,
}
_QUANTIZED = {
  "quant_method": "fp8",
  "activation_scheme": "dynamic",
  "weight_block_size": [32, 32],
  "scale_fmt": "ue8m0",
  "expert_dtype": "fp4",
}


def config_values(
  cfg: ModelConfig, dtype: str, release: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """The config.json of an export; `released_config` makes the same sizes of it.

  Args:
    cfg: sizes of the backbone.
    dtype: "released" or "bfloat16".
    release: the config.json of the release whose vision and drafter tensors the export has, if any;
      what it says besides those sizes stays.
  """
  own, quantized = _text_config(cfg), {"quantization_config": dict(_QUANTIZED)}
  if release is None:
    values = {**_FIXED, "text_config": {**_FIXED_TEXT, **own}, **quantized, "vision_config": None}
  else:
    text = release.get("text_config", release)
    stages = text.get("num_nextn_predict_layers", 0)
    drafter = {
      "num_nextn_predict_layers": stages,
      "compress_ratios": own["compress_ratios"] + [0] * stages,
    }
    rest = release if "text_config" in release else {"vision_config": release.get("vision_config")}
    values = {
      **_FIXED,
      **quantized,
      **rest,
      "text_config": {**_FIXED_TEXT, **text, **own, **drafter},
    }
  if dtype != "released":
    del values["quantization_config"]
  return values


def _text_config(cfg: ModelConfig) -> dict[str, Any]:
  a, i, e, r = cfg.attention, cfg.indexer, cfg.engram, cfg.rope
  pool = i.pool_source
  return {
    "vocab_size": cfg.vocab,
    "hidden_size": cfg.dim,
    "num_hidden_layers": cfg.num_layers,
    "num_attention_heads": a.heads,
    "head_dim": a.head_dim,
    "qk_rope_head_dim": a.rope_dim,
    "q_lora_rank": a.q_rank,
    "o_lora_rank": a.o_rank,
    "o_groups": a.o_groups,
    "sliding_window": a.window,
    "compress_ratios": list(cfg.compress_ratios),
    "kv_source_layer_ids": list(cfg.kv_sources),
    "index_source_layer_ids": list(cfg.index_sources),
    "index_n_heads": i.heads,
    "index_head_dim": i.head_dim,
    "index_topk": i.top_k,
    "candidate_source_layer_id": -1 if pool is None else pool,
    "candidate_topk_blocks": 0 if pool is None else i.pool_blocks,
    "candidate_block_size": 0 if pool is None else i.pool_block_size,
    "rope_theta": r.theta,
    "compress_rope_theta": r.compress_theta,
    "rope_scaling": {
      "type": "yarn",
      "factor": r.yarn_factor,
      "beta_fast": r.yarn_beta_fast,
      "beta_slow": r.yarn_beta_slow,
      "original_max_position_embeddings": r.yarn_original_length,
    },
    "rms_norm_eps": cfg.norm_eps,
    "moe_intermediate_size": cfg.moe.hidden,
    "n_routed_experts": cfg.moe.experts,
    "num_experts_per_tok": cfg.moe.experts_per_token,
    "routed_scaling_factor": cfg.moe.route_scale,
    "swiglu_limit": cfg.moe.limit,
    "hc_mult": cfg.streams,
    "hc_sinkhorn_iters": cfg.sinkhorn_iterations,
    "hc_eps": cfg.hc_eps,
    "engram_layer_ids": list(e.layers),
    "engram_num_embeddings": list(e.table_rows),
    "engram_max_ngram_size": e.max_ngram,
    "engram_vocab_size": e.prime_start,
    "engram_n_heads": e.heads,
    "engram_head_dim": e.head_dim,
    "engram_pad_token_id": e.pad_token,
    "engram_compressed_vocab_size": e.compressed_vocab,
    "num_nextn_predict_layers": 0,
  }
