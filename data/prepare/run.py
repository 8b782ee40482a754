"""A preparation from start to end: text -> tokenizer -> packed rows -> metadata."""

import dataclasses
import hashlib
import json
import math
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer

from data.errors import RequestError
from data.prepare.compression import compression_map
from data.prepare.corpus import Corpus, select
from data.prepare.progress import Advance, phase
from data.prepare.shards import write_split
from data.prepare.sources import read_source
from data.prepare.tokenizer import (
  LARGEST_VOCAB,
  SMALLEST_VOCAB,
  Vocabulary,
  load_tokenizer,
  train_tokenizer,
  vocabulary,
)
from data.prepared import (
  COMPRESSED_ID,
  FORMAT,
  METADATA,
  TOKENIZER,
  Prepared,
  Split,
  file_sha256,
  load_prepared,
  save_prepared,
)
from data.rows import token_dtype
from deepseek_jax.storage_path import RemotePath, StoragePath, upload_tree

SPLITS = ("train", "validation")
ENCODE_AT_ONCE = 64  # documents: enough to keep the library's threads busy between two advances


UNFINISHED = ".unfinished"  # marks a folder as ours until metadata.json completes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareRequest:
  """Everything that decides what a preparation contains."""

  source: str = "python-stdlib"
  text_field: str = "text"  # of JSONL and Parquet
  tokenizer: str = "train:8192"  # train:ENTRIES, or the path of a tokenizer.json
  bos_token: str | None = None  # name in the tokenizer; None: found by known names
  eos_token: str | None = None
  pad_token: str | None = None
  slots: int = 256  # tokens in a row
  validation_share: float = 0.05  # of the documents
  max_megabytes: float | None = None  # of UTF-8 text, 10^6 bytes each; None: all of it

  def problems(self) -> list[str]:
    """Every reason for which this cannot be prepared, the source's contents aside."""
    found = []
    if self.slots < 1:
      found.append(f"--slots must be at least 1, got {self.slots}.")
    if not 0 <= self.validation_share < 1:
      found.append(f"--validation-share must lie in [0, 1), got {self.validation_share}.")
    if self.max_megabytes is not None and not 0 < self.max_megabytes < math.inf:
      found.append(f"--max-megabytes must be positive and finite, got {self.max_megabytes}.")
    entries = self.trained_entries
    if entries is not None and not (
      entries.isdecimal() and SMALLEST_VOCAB <= int(entries) <= LARGEST_VOCAB
    ):
      found.append(
        f"--tokenizer is {self.tokenizer!r}; train:ENTRIES takes a number from "
        f"{SMALLEST_VOCAB} (every byte and three special tokens) to {LARGEST_VOCAB}."
      )
    if entries is None and not pathlib.Path(self.tokenizer).is_file():
      found.append(
        f"--tokenizer is {self.tokenizer!r}, accepted are train:ENTRIES and the path of a "
        "tokenizer.json."
      )
    return found

  @property
  def trained_entries(self) -> str | None:
    """What follows "train:", None for a given tokenizer."""
    kind, colon, entries = self.tokenizer.partition(":")
    return entries if kind == "train" and colon else None

  def identity(self) -> dict:
    """What metadata.json remembers of the request; a given tokenizer counts by its contents."""
    values = dataclasses.asdict(self)
    if self.trained_entries is None:
      values["tokenizer"] = "sha256:" + file_sha256(pathlib.Path(self.tokenizer))
    return values


def existing(request: PrepareRequest, folder: StoragePath) -> Prepared | None:
  """The finished preparation in `folder`, if there is one.

  Raises: RequestError when it was made by another request, or when a file of it is not the one
  that was written.
  """
  if not (folder / METADATA).is_file():
    return None
  prepared, wanted = load_prepared(folder), request.identity()
  differing = [name for name, value in wanted.items() if prepared.request.get(name) != value]
  if differing:
    was = ", ".join(f"{name}={prepared.request.get(name)!r}" for name in differing)
    now = ", ".join(f"{name}={wanted[name]!r}" for name in differing)
    raise RequestError(
      f"{folder} already holds data prepared with {was}, but now {now} is asked for; choose "
      "another --out or remove the folder."
    )
  if damaged := prepared.damaged_files():
    raise RequestError(
      f"{folder} holds this preparation, but {', '.join(damaged)} is missing or has changed; "
      "remove the folder and prepare again."
    )
  return prepared


def prepare(request: PrepareRequest, folder: StoragePath) -> Prepared:
  """Does what `request` says and returns the metadata, which is written last.

  Raises: RequestError when the source or the tokenizer cannot be used.
  """
  _check_ours(folder)
  if isinstance(folder, RemotePath):
    return _prepare_remote(request, folder)
  with phase("reading"):
    corpus = _read(request)
  vocab = _vocabulary(request, corpus)
  _clear_unfinished(folder)
  vocab.tokenizer.save(str(folder / TOKENIZER))
  compressed_id_V = compression_map(vocab.tokenizer, vocab.size)
  np.save(folder / COMPRESSED_ID, compressed_id_V)
  splits = {name: _write(folder, name, corpus.split(name), vocab, request) for name in SPLITS}
  written = {
    "slots": request.slots,
    "vocab": vocab.size,
    "dtype": token_dtype(vocab.size),
    "bos": vocab.bos,
    "eos": vocab.eos,
    "pad": vocab.pad,
    "compressed_classes": int(compressed_id_V.max()) + 1,
    "tokenizer_sha256": file_sha256(folder / TOKENIZER),
    "compressed_id_sha256": file_sha256(folder / COMPRESSED_ID),
  }
  about = {
    "folder": folder,
    "request": request.identity(),
    "source_sha256": corpus.source_sha256,
    "dropped": corpus.dropped,
    "fingerprint": _fingerprint(written, splits),
  }
  prepared = Prepared.from_dict(about | written | splits)
  save_prepared(prepared)
  (folder / UNFINISHED).unlink()
  return prepared


def _prepare_remote(request: PrepareRequest, folder: RemotePath) -> Prepared:
  """Prepares in a temporary folder and copies it, the metadata last."""
  with tempfile.TemporaryDirectory() as temporary:
    here = pathlib.Path(temporary)
    prepared = dataclasses.replace(prepare(request, here), folder=folder)
    (here / METADATA).unlink()
    (folder / UNFINISHED).write_bytes(b"")
    for name in set(folder.names_below()) - {UNFINISHED}:  # of a killed preparation
      (folder / name).unlink()
    with phase(f"copying to {folder}"):
      upload_tree(here, folder)
  save_prepared(prepared)
  (folder / UNFINISHED).unlink()
  return prepared


def _read(request: PrepareRequest) -> Corpus:
  limit = request.max_megabytes
  corpus = select(
    read_source(request.source, request.text_field),
    validation_share=request.validation_share,
    max_bytes=None if limit is None else int(limit * 1e6),
  )
  if not corpus.train:
    raise RequestError(
      f"--source is {request.source!r}, which gives no training document; left out were "
      f"{_listed(corpus.dropped)}."
    )
  if request.validation_share and not corpus.validation:
    raise RequestError(
      f"None of the {len(corpus.train)} documents fell into the validation split; raise "
      f"--validation-share above {request.validation_share}, or set it to 0 for none."
    )
  return corpus


def _vocabulary(request: PrepareRequest, corpus: Corpus) -> Vocabulary:
  stated = {"bos": request.bos_token, "eos": request.eos_token, "pad": request.pad_token}
  return vocabulary(_tokenizer(request, corpus), stated)


def _tokenizer(request: PrepareRequest, corpus: Corpus) -> Tokenizer:
  if request.trained_entries is None:
    return load_tokenizer(pathlib.Path(request.tokenizer))
  with phase("training the tokenizer", len(corpus.train)) as advance:
    return train_tokenizer(_counted(corpus.train, advance), int(request.trained_entries))


def _counted(texts: list[str], advance: Advance) -> Iterator[str]:
  for text in texts:
    yield text
    advance(1)


def _write(
  folder: pathlib.Path, name: str, texts: list[str], vocab: Vocabulary, request: PrepareRequest
) -> Split:
  documents = []
  with phase(f"encoding the {name} split", len(texts)) as advance:
    for start in range(0, len(texts), ENCODE_AT_ONCE):
      chunk = texts[start : start + ENCODE_AT_ONCE]
      documents += vocab.encode(chunk)
      advance(len(chunk))
  size = sum(len(text.encode()) for text in texts)
  return write_split(
    folder, name, documents, text_bytes=size, slots=request.slots, vocab=vocab.size
  )


def _check_ours(folder: StoragePath) -> None:
  """Refuses a folder with files that no preparation of ours began."""
  if isinstance(folder, RemotePath):
    used = bool(folder.names_below())
  else:
    used = folder.is_dir() and any(folder.iterdir())
  if used and not (folder / UNFINISHED).is_file():
    raise RequestError(
      f"--out {folder} holds files that are not of an unfinished preparation; name a new or an "
      "empty folder."
    )


def _clear_unfinished(folder: pathlib.Path) -> None:
  """Makes the folder, and removes what a killed preparation left there."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / UNFINISHED).touch()
  for split in SPLITS:
    for shard in folder.glob(f"{split}-*-of-*.array_record"):
      shard.unlink()


def _fingerprint(written: dict, splits: dict[str, Split]) -> str:
  shards = {
    name: [(shard.rows, shard.sha256) for shard in split.shards] for name, split in splits.items()
  }
  text = json.dumps([FORMAT, written, shards], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _listed(dropped: dict[str, int]) -> str:
  return ", ".join(f"{count} {reason}" for reason, count in dropped.items())
