"""A folder that `prepare` wrote: its metadata, as typed values.

metadata.json      written last: a folder without it is not finished
tokenizer.json     the tokenizer, whole
compressed_id.npy  [V] int32, token id -> class of the Engram hash (model.md section 2.8.1)
train-00000-of-00001.array_record, validation-...   packed rows, see data/rows.py
"""

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

from data.errors import DataError
from deepseek_jax.config import Config
from deepseek_jax.storage_path import StoragePath, hash_file, storage_path, write_atomically

METADATA = "metadata.json"
TOKENIZER = "tokenizer.json"
COMPRESSED_ID = "compressed_id.npy"
FORMAT = 1  # of rows and metadata; another one is refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(Config):
  name: str
  rows: int
  sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Config):
  """What one split holds. Every byte of a document is covered by its targets, and so is its EOS.

  Of chats, documents are conversations, targets the tokens of learned answers, bytes their text.
  """

  documents: int
  rows: int
  tokens: int  # in slots, BOS and EOS included
  targets: int  # tokens that are predicted: all but the first of each document
  bytes: int  # UTF-8 bytes of the documents
  padding_fraction: float  # slots without a token
  shards: tuple[Shard, ...]

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> Self:
    """Builds the split as metadata.json holds it, with a derived value beside the others."""
    kept = {name: value for name, value in values.items() if name != "bytes_per_token"}
    return super().from_dict(kept | {"shards": [Shard.from_dict(s) for s in kept["shards"]]})

  @property
  def bytes_per_token(self) -> float:
    """Bytes per predicted token."""
    return self.bytes / max(self.targets, 1)

  def bits_per_byte(self, nats_per_target: float) -> float:
    """Mean loss in nats per target -> bits per byte of text."""
    return nats_per_target / math.log(2) / self.bytes_per_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared(Config):
  """The metadata of one folder."""

  folder: StoragePath
  request: dict  # the arguments that made it
  slots: int
  vocab: int  # largest token id + 1
  dtype: str  # of the tokens on disk
  bos: int
  eos: int
  pad: int
  compressed_classes: int
  tokenizer_sha256: str
  compressed_id_sha256: str
  source_sha256: str
  dropped: dict[str, int]  # reason -> documents left out
  dropped_names: tuple[str, ...] = ()  # of chats: what was left out for its length or loss, each
  contents: Literal["text", "chat"] = "text"
  decoder_slots: int | None = None  # of chats: what the answers of a row take at most, with ...
  window: int | None = None  # ... so many tokens before each of them
  train: Split
  validation: Split
  fingerprint: str  # of everything that decides what is read

  def split(self, name: str) -> Split:
    return {"train": self.train, "validation": self.validation}[name]

  def replay_problems(self, *, decoder_slots: int, window: int) -> list[str]:
    """Why steps with replay cannot read these rows, in plain sentences.

    Args:
      decoder_slots: T of such a step.
      window: slots of the model's sliding window.
    """
    if self.decoder_slots is None or self.window is None:
      return [f"Replay is for chats, but {self.folder} holds {self.contents}."]
    found = []
    if decoder_slots < self.decoder_slots:
      found.append(
        f"data.replay.decoder_slots is {decoder_slots}, but rows of {self.folder} take up to "
        f"{self.decoder_slots}; raise it, or prepare them again with --decoder-slots."
      )
    if window > self.window:
      found.append(
        f"model.attention.window is {window}, but rows of {self.folder} were packed for windows of "
        f"{self.window}; prepare them again with --window {window}."
      )
    return found

  def damaged_files(self) -> list[str]:
    """Names of the files that are missing or not those that were written; reads all of them."""
    shards = self.train.shards + self.validation.shards
    expected = {shard.name: shard.sha256 for shard in shards}
    expected |= {TOKENIZER: self.tokenizer_sha256, COMPRESSED_ID: self.compressed_id_sha256}
    path = lambda name: self.folder / name
    return [n for n, h in expected.items() if not path(n).is_file() or file_sha256(path(n)) != h]

  def compressed_id(self) -> np.ndarray:
    """[V] int32 class of each token id. Raises DataError when the file has changed."""
    path = self.folder / COMPRESSED_ID
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != self.compressed_id_sha256:
      raise DataError(f"{path} is damaged: it is not the file that {METADATA} describes.")
    return np.load(io.BytesIO(data))


def load_prepared(folder: str | StoragePath) -> Prepared:
  """Reads a folder's metadata.

  Raises: FileNotFoundError where no finished preparation lies, DataError where its metadata cannot
  be read or has another format, another OSError where a store cannot be used.
  """
  folder = storage_path(folder)
  text = (folder / METADATA).read_bytes()
  try:
    values = json.loads(text)
    if values.pop("format") != FORMAT:
      raise DataError(f"{folder} was prepared in another format; prepare it again.")
    return Prepared.from_dict(values | {"folder": folder})
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise DataError(f"{folder / METADATA} is damaged ({error}); prepare it again.") from error


def save_prepared(prepared: Prepared) -> None:
  """Writes the metadata in one step: this is the moment at which the folder becomes valid."""
  values = {"format": FORMAT, **dataclasses.asdict(prepared)}
  del values["folder"]
  for name in ("train", "validation"):
    values[name]["bytes_per_token"] = prepared.split(name).bytes_per_token
  text = json.dumps(values, indent=2, sort_keys=True) + "\n"
  write_atomically(prepared.folder / METADATA, text.encode())


def file_sha256(path: StoragePath) -> str:
  return hash_file(path).sha256
