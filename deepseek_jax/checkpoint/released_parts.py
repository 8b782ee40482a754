"""Tensors of the release that our model does not hold yet: vision tower, aligner, drafter.

They are known by name, shape and dtype, so that an import checks them, an export can take them over
from the release, and both can tell them from tensors that nobody knows (model.md sections 1.3, 1.4,
4).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from deepseek_jax.checkpoint.released_names import LAYER, ReleasedTensor, Stored, layer_tensors
from deepseek_jax.config import ModelConfig

# Beginnings of their names.
VISION = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFTER = ("mtp.",)
PARTS = {"vision": VISION, "drafter": DRAFTER}
NOT_BACKBONE = (*VISION, *DRAFTER)


@dataclasses.dataclass(frozen=True)
class VisionSizes:
  layers: int = 32
  dim: int = 1024
  hidden: int = 2816
  patch: int = 14  # pixels along a side
  merge: int = 3  # patches along a side of a visual token

  @classmethod
  def from_config(cls, values: Mapping[str, Any]) -> Self | None:
    """Of a released config.json; None for one without pictures. KeyError for a missing key."""
    vision = values.get("vision_config")
    if vision is None:
      return None
    return cls(
      layers=vision["num_hidden_layers"],
      dim=vision["hidden_size"],
      hidden=vision["intermediate_size"],
      patch=vision["patch_size"],
      merge=vision["downsample_ratio"],
    )


@dataclasses.dataclass(frozen=True)
class DrafterSizes:
  stages: int = 3
  experts: int = 128
  markov_rank: int = 256
  targets: int = 3  # backbone layers whose inputs the drafter reads

  @classmethod
  def from_config(cls, values: Mapping[str, Any]) -> Self | None:
    """Of a released config.json; None for one without stages. KeyError for a missing key."""
    text = values.get("text_config", values)
    if not text.get("num_nextn_predict_layers"):
      return None
    return cls(
      stages=text["num_nextn_predict_layers"],
      experts=text["dspark_n_routed_experts"],
      markov_rank=text["dspark_markov_rank"],
      targets=len(text["dspark_target_layer_ids"]),
    )


def part_tensors(values: Mapping[str, Any], cfg: ModelConfig) -> Iterator[ReleasedTensor]:
  """All that a released config.json has beside the backbone. KeyError for a missing key."""
  vision, drafter = VisionSizes.from_config(values), DrafterSizes.from_config(values)
  if vision is not None:
    yield from vision_tensors(vision, cfg)
  if drafter is not None:
    yield from drafter_tensors(drafter, cfg)


def vision_tensors(sizes: VisionSizes, cfg: ModelConfig) -> Iterator[ReleasedTensor]:
  """The tower, the aligner and the three vectors of an image span."""
  d, hidden, width = sizes.dim, sizes.hidden, cfg.dim
  yield from _linear("vision.patch_embed.proj", d, 3 * sizes.patch**2)
  for number in range(sizes.layers):
    block = f"vision.blocks.{number}"
    yield _plain(f"{block}.norm1.weight", d)
    yield from _linear(f"{block}.attn.wqkv", 3 * d, d)
    yield from _linear(f"{block}.attn.wo", d, d)
    yield _plain(f"{block}.norm2.weight", d)
    yield _plain(f"{block}.mlp.w1.weight", 2 * hidden, d)
    yield _plain(f"{block}.mlp.w2.weight", d, hidden)
  yield _plain("vision.norm.weight", d)
  yield from _linear("aligner.w1", width, sizes.merge**2 * d)
  yield from _linear("aligner.w2", width, width)
  for place in ("start", "end", "newline"):
    yield _plain(f"image_{place}", width)


def drafter_tensors(sizes: DrafterSizes, cfg: ModelConfig) -> Iterator[ReleasedTensor]:
  """The stages, and what the first and the last of them have besides."""
  moe = dataclasses.replace(cfg.moe, experts=sizes.experts)
  like = dataclasses.replace(cfg, moe=moe)
  last = sizes.stages - 1
  for stage in range(sizes.stages):
    yield from layer_tensors(f"mtp.{stage}.", LAYER, like)
  yield _plain("mtp.0.main_proj.weight", cfg.dim, sizes.targets * cfg.dim, stored="fp8")
  yield _plain("mtp.0.main_norm.weight", cfg.dim)
  yield _plain(f"mtp.{last}.norm.weight", cfg.dim)
  for name in ("embed", "head"):
    yield _plain(f"mtp.{last}.markov_head.{name}.weight", cfg.vocab, sizes.markov_rank)
  yield _plain(f"mtp.{last}.confidence_head.proj.weight", 1, cfg.dim + sizes.markov_rank)


def _linear(name: str, out: int, inputs: int) -> Iterator[ReleasedTensor]:
  yield _plain(f"{name}.weight", out, inputs)
  yield _plain(f"{name}.bias", out)


def _plain(name: str, *shape: int, stored: Stored = "bf16") -> ReleasedTensor:
  return ReleasedTensor(name, stored, shape, 1, "same")
