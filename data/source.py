"""Rows of one split of a prepared folder by number, past records that cannot be read."""

import bisect
import itertools
from typing import NamedTuple

from array_record.python.array_record_data_source import ArrayRecordDataSource

from data.conversation import Conversation
from data.errors import DataError
from data.local_copy import local_copies
from data.prepared import Prepared
from data.rows import decode_row
from deepseek_jax.layout import Document


class Row(NamedTuple):
  record: str  # SHARD:INDEX of what was read, "" for an empty row
  documents: list[Document] | list[Conversation]
  damaged: tuple[str, ...] = ()  # SHARD:INDEX of records that could not be read on the way
  number: int = 0  # of what was read, in its folder


class RowSource:
  """Random access to rows; ArrayRecord's own checksums tell which are damaged.

  In place of a damaged record stands the next readable one (`replace`), or an empty row. Either
  depends on the files alone, so every host and every resumed run sees the same.
  """

  def __init__(self, prepared: Prepared, split: str, *, replace: bool, max_damaged: int):
    """Opens the shards; those in a store are copied to this machine first.

    Raises: DataError when one is missing, cut short or has other rows.
    """
    self._dtype = prepared.dtype
    shards = prepared.split(split).shards
    self._shards = [prepared.folder / shard.name for shard in shards]
    rows = [shard.rows for shard in shards]
    self._ends = list(itertools.accumulate(rows))
    self._replace = replace
    self._max_damaged = max_damaged
    copies = local_copies(prepared.folder, [(shard.name, shard.sha256) for shard in shards])
    for path, expected in zip(copies, rows, strict=True):
      _check_shard(str(path), expected)
    self._records = ArrayRecordDataSource([str(path) for path in copies])

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int) -> Row:
    damaged = []
    for ahead in range(self._max_damaged + 1):
      number = (index + ahead) % len(self)
      try:
        record = self._records[number]
      except RuntimeError:  # how ArrayRecord reports a failed checksum
        damaged.append(self.name(number))
      else:
        row = decode_row(record, self._dtype)
        return Row(self.name(number), row, tuple(damaged), number)
      if not self._replace:
        break
    return Row("", [], tuple(damaged))

  def name(self, number: int) -> str:
    """SHARD:INDEX of a row, as messages give it."""
    shard = bisect.bisect_right(self._ends, number)
    first = self._ends[shard - 1] if shard else 0
    return f"{self._shards[shard]}:{number - first}"


def _check_shard(path: str, expected: int) -> None:
  try:
    rows = len(ArrayRecordDataSource([path]))
  except (RuntimeError, OSError) as error:
    reason, *_ = str(error).splitlines() or ["ArrayRecord gives no reason"]  # if cut short
    raise DataError(f"{path} cannot be opened ({reason}); prepare its folder again.") from error
  if rows != expected:
    raise DataError(f"{path} holds {rows} rows instead of {expected}; prepare its folder again.")
