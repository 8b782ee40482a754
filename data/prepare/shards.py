"""Packed rows of one split -> ArrayRecord shards."""

import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from data.prepare.packing import pack
from data.prepared import Shard, Split, file_sha256
from data.rows import encode_row, token_dtype

OPTIONS = "group_size:1"  # each row is read by itself, as Grain asks
SHARD_TOKENS = 32 * 2**20  # 64 MB of uint16: few files, and small enough to move around


def write_split(
  folder: pathlib.Path,
  name: str,
  documents: Sequence[np.ndarray],
  *,
  text_bytes: int,
  slots: int,
  vocab: int,
  shard_tokens: int = SHARD_TOKENS,
) -> Split:
  """Packs and writes the tokens of one split, and says what was written.

  Args:
    folder: where the shards go.
    name: "train" or "validation".
    documents: int32 tokens of each, in order.
    text_bytes: UTF-8 bytes of the documents.
    slots: tokens in a row.
    vocab: decides the type on disk.
    shard_tokens: slots in one shard, about.
  """
  tokens = sum(len(document) for document in documents)
  rows = -(-tokens // slots)
  records = (encode_row(row, token_dtype(vocab)) for row in pack(documents, slots))
  shards = write_records(folder, name, records, rows=rows, slots=slots, shard_tokens=shard_tokens)
  return Split(
    documents=len(documents),
    rows=rows,
    tokens=tokens,
    targets=tokens - len(documents),
    bytes=text_bytes,
    padding_fraction=1 - tokens / (rows * slots) if rows else 0.0,
    shards=shards,
  )


def write_records(
  folder: pathlib.Path,
  name: str,
  records: Iterator[bytes],
  *,
  rows: int,
  slots: int,
  shard_tokens: int = SHARD_TOKENS,
) -> tuple[Shard, ...]:
  """Writes the rows of one split, which are `rows` records of `slots` slots, into its shards."""
  per_shard = max(1, shard_tokens // slots)
  count = -(-rows // per_shard)
  shards = []
  for number in range(count):
    path = folder / f"{name}-{number:05d}-of-{count:05d}.array_record"
    size = min(per_shard, rows - number * per_shard)
    _write(path, itertools.islice(records, size))
    shards.append(Shard(name=path.name, rows=size, sha256=file_sha256(path)))
  return tuple(shards)


def _write(path: pathlib.Path, records: Iterable[bytes]) -> None:
  writer = ArrayRecordWriter(str(path), OPTIONS)
  for record in records:
    writer.write(record)
  writer.close()
