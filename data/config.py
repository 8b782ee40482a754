"""Which prepared data a run reads, in which order, and when it gives up. Frozen."""

import dataclasses
from typing import Literal

from data.errors import DataError
from data.prepared import Prepared, load_prepared
from deepseek_jax.config import Config
from deepseek_jax.layout import Replay
from deepseek_jax.storage_path import url_problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(Config):
  """Which rows see what a server's bounded replay makes of them (deepseek_jax/layout.py).

  The report says that post-training simulates replay, neither how often nor where; all of this is
  ours. Half of the steps, so that the model keeps to what it gives without replay.
  """

  share: float = 0.0  # of the steps; their rows have decoder_slots instead of data.slots
  decoder_slots: int = 1024  # T of those rows
  hit_share: float = 0.5  # of the rows of those steps; prefixes are found without their windows
  border_share: float = 0.5  # of the hits; right after the response before, the others anywhere
  max_hits: int = 4  # in a row, which has a window of slots more for each
  hit_multiple: int = 8  # tokens; with a candidate pool whole blocks of it
  short_input: Literal["window", "exact"] = "window"  # see layout.Replay

  def of_rows(self, window: int) -> Replay:
    """What the layout has to know, for a model with this window."""
    return Replay(
      window=window,
      decoder_slots=self.decoder_slots,
      hit_multiple=self.hit_multiple,
      short_input=self.short_input,
    )

  def problems(self) -> list[str]:
    """Every value that cannot be used, in plain sentences."""
    found = []
    for name in ("share", "hit_share", "border_share"):
      if not 0 <= getattr(self, name) <= 1:
        found.append(f"data.replay.{name} must lie in 0 ... 1, got {getattr(self, name)}.")
    for name, least in (("decoder_slots", 1), ("max_hits", 0), ("hit_multiple", 1)):
      if getattr(self, name) < least:
        found.append(f"data.replay.{name} must be at least {least}, got {getattr(self, name)}.")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
  paths: tuple[str, ...] = ()  # folders that `prepare` wrote
  weights: tuple[float, ...] = ()  # share of the rows that each folder gives; empty: equal shares
  slots: int = 256  # S, tokens in a row; the folders must have been prepared with it
  batch_rows: int = 4  # rows of a step, over all hosts
  shuffle_seed: int = 0  # 0 ... 2^32 - 1
  max_damaged_records: int = 10  # distinct ones a host skips; one more stops the run
  reader_threads: int = 2  # per host
  prefetch_batches: int = 8  # batches that are built ahead, per host
  stall_seconds: float = 300.0  # longest wait for a batch
  replay: ReplayConfig = ReplayConfig()

  def problems(self) -> list[str]:
    """Every reason for which no batch can be read, in plain sentences; reads the metadata."""
    found, folders = self.value_problems(), []
    if not self.paths:
      found.append("data.paths is empty; name at least one folder that `prepare` wrote.")
    for path in self.paths:
      if problem := url_problem("data.paths", path):
        found.append(problem)
        continue
      try:
        folders.append(load_prepared(path))
      except FileNotFoundError:
        found.append(
          f"data.paths names {path!r}, where no finished preparation lies; make one with "
          f"`python -m train prepare --out {path}`."
        )
      except OSError as error:
        found.append(f"data.paths names {path!r}, which cannot be read: {error.strerror}.")
      except DataError as error:
        found.append(f"data.paths: {error}")
    return found + self._folder_problems(folders)

  def value_problems(self) -> list[str]:
    """Those of `problems` that can be seen without any data."""
    found = []
    if self.weights and len(self.weights) != len(self.paths):
      found.append(
        f"data.weights has {len(self.weights)} values for {len(self.paths)} paths; give one for "
        "each, or none."
      )
    if any(not weight > 0 for weight in self.weights):
      found.append(f"data.weights must be positive, got {self.weights}.")
    for name in ("slots", "batch_rows", "reader_threads", "prefetch_batches"):
      if getattr(self, name) < 1:
        found.append(f"data.{name} must be at least 1, got {getattr(self, name)}.")
    if not 0 <= self.shuffle_seed < 2**32:
      found.append(f"data.shuffle_seed must lie in 0 ... 2^32 - 1, got {self.shuffle_seed}.")
    if self.max_damaged_records < 0:
      found.append(f"data.max_damaged_records must be 0 or more, got {self.max_damaged_records}.")
    if not self.stall_seconds > 0:
      found.append(f"data.stall_seconds must be positive, got {self.stall_seconds}.")
    return found + self.replay.problems()

  def _folder_problems(self, folders: list[Prepared]) -> list[str]:
    found = []
    for prepared in folders:
      if prepared.slots != self.slots:
        found.append(
          f"data.slots is {self.slots}, but {prepared.folder} was prepared with "
          f"{prepared.slots} slots."
        )
      if not prepared.train.rows:
        found.append(f"data.paths names {prepared.folder}, which has no training rows.")
    if len({prepared.tokenizer_sha256 for prepared in folders}) > 1:
      found.append(
        "data.paths mixes folders with different tokenizers; prepare all of them with one "
        "tokenizer.json."
      )
    return found
