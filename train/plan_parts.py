"""Parts of the release that this code does not build yet, counted from the shapes of model.md."""

import dataclasses

from deepseek_jax.config import LayerSpec, ModelConfig
from deepseek_jax.flops import layer_parameters

NOT_BUILT = ("vision", "drafter")  # names in plan.json
_WIDTH = 5120  # of the backbone that both parts are made for

# Section 1.4: config.json, vision_config.
_VISION_LAYERS, _VISION_DIM, _VISION_HIDDEN, _PATCH = 32, 1024, 2816, 14
_MERGE = 3  # patches along each side of a visual token
PATCHES_PER_TOKEN = _MERGE**2
MAX_VISUAL_TOKENS = 1024  # of an image

# Section 1.3: the drafter's stages and its experts.
_STAGES, _DRAFT_EXPERTS, _DRAFT_EXPERTS_PER_TOKEN, _MARKOV_RANK = 3, 128, 3, 256
_TARGET_LAYERS = 3  # backbone layers whose inputs the drafter reads


def vision_parameters(cfg: ModelConfig) -> int:
  """Vision tower, aligner and the three span vectors (model.md section 4); 0 for other widths."""
  if cfg.dim != _WIDTH:
    return 0
  d, h = _VISION_DIM, _VISION_HIDDEN
  patch = 3 * _PATCH**2 * d + d
  attention = 3 * d * d + 3 * d + d * d + d  # wqkv and wo, with biases
  block = 2 * d + attention + 2 * h * d + d * h  # two norms, attention, gate and up, down
  merged = PATCHES_PER_TOKEN * d
  aligner = merged * cfg.dim + cfg.dim + cfg.dim**2 + cfg.dim
  return patch + _VISION_LAYERS * block + d + aligner + 3 * cfg.dim


def drafter_parameters(cfg: ModelConfig) -> int:
  """The three DSpark stages and their heads (model.md section 4); 0 for other widths."""
  if cfg.dim != _WIDTH:
    return 0
  moe = dataclasses.replace(
    cfg.moe, experts=_DRAFT_EXPERTS, experts_per_token=_DRAFT_EXPERTS_PER_TOKEN
  )
  window_only = LayerSpec(
    layer=0,
    kind="swa",
    ratio=0,
    kv_source=None,
    index_source=None,
    pool=None,
    engram=None,
    starts_decoder=False,
  )
  stage = layer_parameters(dataclasses.replace(cfg, moe=moe), window_only)
  stages = _STAGES * (stage.matrices + stage.experts + stage.gains + stage.router_bias)
  projection = _TARGET_LAYERS * cfg.dim * cfg.dim
  markov = 2 * cfg.vocab * _MARKOV_RANK
  confidence = cfg.dim + _MARKOV_RANK
  return stages + projection + 2 * cfg.dim + markov + confidence  # 2 norms: main_norm and norm
