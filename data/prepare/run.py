"""A preparation from start to end: text -> tokenizer -> packed rows -> metadata."""

import dataclasses
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator

import numpy as np

from data.errors import RequestError
from data.prepare.chat_contents import ChatContents
from data.prepare.compression import cached_compression_map, compression_map
from data.prepare.corpus import Corpus, select
from data.prepare.progress import Advance, phase
from data.prepare.request import PrepareRequest
from data.prepare.sources import SourceText
from data.prepare.text_contents import TextContents
from data.prepare.tokenizer import Vocabulary, load_tokenizer, train_tokenizer, vocabulary
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
UNFINISHED = ".unfinished"  # marks a folder as ours until metadata.json completes it


def existing(request: PrepareRequest, folder: StoragePath) -> Prepared | None:
  """The finished preparation in `folder`, if there is one.

  Raises: RequestError when it was made by another request, or when a file of it is not the one
  that was written.
  """
  if not (folder / METADATA).is_file():
    return None
  prepared, wanted = load_prepared(folder), request.identity()
  # What an older preparation does not name was then as it is by default.
  known = dataclasses.asdict(PrepareRequest()) | prepared.request
  differing = [name for name, value in wanted.items() if known[name] != value]
  if differing:
    was = ", ".join(f"{name}={known[name]!r}" for name in differing)
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
  contents = ChatContents(request) if request.format == "chat" else TextContents(request)
  with phase("reading"):
    corpus = _read(request, contents.documents())
  vocab = _vocabulary(request, corpus, contents)
  contents.use(vocab, corpus)
  _clear_unfinished(folder)
  vocab.tokenizer.save(str(folder / TOKENIZER))
  mapped = compression_map if request.trained_entries else cached_compression_map
  compressed_id_V = mapped(vocab.tokenizer, vocab.size)
  np.save(folder / COMPRESSED_ID, compressed_id_V)
  splits = {name: contents.write(folder, name) for name in SPLITS}
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
    "dropped": corpus.dropped | contents.dropped,
    "fingerprint": _fingerprint(written, splits),
  }
  about |= contents.about()
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


def _read(request: PrepareRequest, documents: Iterable[SourceText]) -> Corpus:
  limit = request.max_megabytes
  corpus = select(
    documents,
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


def _vocabulary(
  request: PrepareRequest, corpus: Corpus, contents: TextContents | ChatContents
) -> Vocabulary:
  stated = {"bos": request.bos_token, "eos": request.eos_token, "pad": request.pad_token}
  if request.trained_entries is None:
    return vocabulary(load_tokenizer(request.tokenizer_path), stated)
  texts = contents.training_texts(corpus.train)
  with phase("training the tokenizer", len(corpus.train)) as advance:
    trained = train_tokenizer(
      _counted(texts, advance), int(request.trained_entries), chat=request.has_chat_tokens
    )
  return vocabulary(trained, stated)


def _counted(texts: Iterable[str], advance: Advance) -> Iterator[str]:
  for text in texts:
    yield text
    advance(1)


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
