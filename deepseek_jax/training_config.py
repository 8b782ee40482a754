"""Hyper-parameters of training that the library reads: objective, optimizer, mesh. Frozen."""

import dataclasses
from typing import Literal

from deepseek_jax.config import Config

IndexerLoss = Literal["off", "dense", "sparse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config):
  balance_weight: float = 1e-4  # sequence balance loss (report 4.2)
  # KL of the indexer on its own selection, on all entries that it may choose from, or none.
  indexer: IndexerLoss = "sparse"
  indexer_weight: float = 1.0  # undisclosed by the report; ours
  vocab_chunk_tokens: int = 1024  # tokens whose logits exist at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConfig(Config):
  """Changes of low rank in place of full fine-tuning (optim/low_rank.py)."""

  rank: int = 0  # of a matrix's change; 0: the weights themselves train
  alpha: float = 16.0  # the change is alpha / rank A B; ours
  parts: tuple[Literal["attention", "experts", "shared"], ...] = ("attention", "experts", "shared")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
  """Source of the defaults, where none is beside them: model.md sections 6.1 to 6.3."""

  # "muon": Muon, Sinkhorn-balanced momentum and AdamW, each where the report has it (optim/
  # partition.py); "adamw": AdamW everywhere, to compare with.
  matrices: Literal["muon", "adamw"] = "muon"
  peak_lr: float = 2.6e-4
  warmup_steps: int = 2000
  final_lr: float = 2.6e-5  # from decay_end on, by a cosine from decay_begin
  decay_begin: int | None = 28_000_000_000_000  # tokens; None: the end of the warm-up
  decay_end: int | None = 40_000_000_000_000  # tokens; None: the end of the run
  table_lr: float = 5.0  # of Engram tables, over the rest
  momentum: float = 0.95  # Nesterov's, of Muon and of Sinkhorn-balanced momentum
  update_rms: float = 0.18  # of what these two move a matrix or a row by, before the learning rate
  # Operands of Muon's products; the report states none, ours.
  muon_dtype: Literal["float32", "bfloat16"] = "float32"
  beta1: float = 0.9  # of AdamW, and so are beta2 and eps
  beta2: float = 0.95
  eps: float = 1e-20
  weight_decay: float = 0.1
  clip_norm: float = 1.0  # of the global gradient; ours, the report states none
  bias_speed: float = 0.001  # router bias, per step (report 4.2)
  frozen: tuple[str, ...] = ()  # roles or parts of parameters that do not train (optim/frozen.py)
  low_rank: LowRankConfig = LowRankConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Config):
  """Devices along each mesh axis; the product is the number of devices."""

  replica: int = 1  # whole copies, across slices of a pod
  fsdp: int = 1  # batch and weights
  expert: int = 1
  context: int = 1
  tensor: int = 1
