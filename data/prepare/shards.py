"""Packed rows of one split -> ArrayRecord shards."""

import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from data.prepare.packing import pack
from data.prepared import Shard, Split, file_sha256
from data.rows import encode_row, token_dtype
from deepseek_jax.layout import Document

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
  per_shard = max(1, shard_tokens // slots)
  count = -(-rows // per_shard)
  packed = pack(documents, slots)
  shards = []
  for number in range(count):
    path = folder / f"{name}-{number:05d}-of-{count:05d}.array_record"
    size = min(per_shard, rows - number * per_shard)
    _write(path, (next(packed) for _ in range(size)), token_dtype(vocab))
    shards.append(Shard(name=path.name, rows=size, sha256=file_sha256(path)))
  return Split(
    documents=len(documents),
    rows=rows,
    tokens=tokens,
    targets=tokens - len(documents),
    bytes=text_bytes,
    padding_fraction=1 - tokens / (rows * slots) if rows else 0.0,
    shards=tuple(shards),
  )


def _write(path: pathlib.Path, rows: Iterable[list[Document]], dtype: str) -> None:
  writer = ArrayRecordWriter(str(path), OPTIONS)
  for row in rows:
    writer.write(encode_row(row, dtype))
  writer.close()
