"""The frozen tree that every configuration becomes, with the sections that only programs read.

The defaults stand here, in deepseek_jax/config.py, deepseek_jax/training_config.py and
data/config.py, each once; the unit of every key is in configs/base.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from data.config import DataConfig
from deepseek_jax.config import Config, ModelConfig
from deepseek_jax.training_config import MeshConfig, ObjectiveConfig, OptimConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
  every_steps: int = 1000
  keep_last: int = 3
  keep_every: int = 10_000
  on_error: Literal["stop", "continue"] = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationConfig(Config):
  every_steps: int = 1000
  rows: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig(Config):
  every_steps: int = 10
  observed_queries: int = 16  # of a row; what watching costs: docs/log.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig(Config):
  start_step: int = 10
  steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Config):
  """A part of a run, as what differs from the part before it (train/stages.py)."""

  name: str
  tokens: int  # of the run when it begins, padding included; it waits for the end of a step
  changes: Mapping[str, Any]  # dotted key -> value from here on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Config):
  """Everything that decides what a training run computes."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  objective: ObjectiveConfig = ObjectiveConfig()
  optim: OptimConfig = OptimConfig()
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  validation: ValidationConfig = ValidationConfig()
  log: LogConfig = LogConfig()
  profile: ProfileConfig = ProfileConfig()
  stages: tuple[Stage, ...] = ()  # that follow the part which all other keys describe
  total_steps: int = 447_000  # 45 T tokens in steps of 100.6 M (report 4.2)
  accumulation: int = 1
  seed: int = 0
  max_skipped_steps: int = 3
