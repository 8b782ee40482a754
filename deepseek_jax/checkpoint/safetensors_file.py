"""Safetensors files with every dtype that the release uses: whole, by rows, and written in pieces.

The library of that name reads and writes whole tensors only; a table of the release has 98 GB. A
file is the length of its header (8 bytes), the header as JSON, and the tensors one after another.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
  "F32": np.float32,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E8M0": ml_dtypes.float8_e8m0fnu,
  "I8": np.int8,
  "U8": np.uint8,
  "I32": np.int32,
  "I64": np.int64,
  "BOOL": np.bool_,
}
ITEM_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
_LENGTH = 8  # bytes of the header's length
_METADATA = "__metadata__"  # the one entry of a header that is no tensor
_HEADER_AT_MOST = 100_000_000  # bytes, a rule of the format


class Header(NamedTuple):
  dtype: str  # a key of DTYPES
  shape: tuple[int, ...]

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class StoredTensor(NamedTuple):
  """Where a tensor lies."""

  path: pathlib.Path
  header: Header
  offset: int  # of its first byte in the file

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Part of the tensor along its first axis; reads nothing else."""
    row = self.header._replace(shape=self.header.shape[1:])
    part = Header(row.dtype, (stop - start, *row.shape))
    return self._read(part, self.offset + start * row.bytes)

  def whole(self) -> np.ndarray:
    return self._read(self.header, self.offset)

  def _read(self, part: Header, offset: int) -> np.ndarray:
    dtype, count = DTYPES[part.dtype], math.prod(part.shape)
    flat = np.fromfile(self.path, dtype, count, offset=offset)
    if len(flat) < count:
      raise ValueError(f"{self.path} ends before its header says that it does.")
    return flat.reshape(part.shape)


def read_headers(path: pathlib.Path) -> dict[str, StoredTensor]:
  """The tensors of a file by name, without reading them.

  Raises: ValueError for a damaged file or an unknown dtype; OSError.
  """
  if not path.is_file():  # a pipe would never end
    raise _damaged(path, "it is no file")
  size = path.stat().st_size
  with open(path, "rb") as file:
    length = int.from_bytes(file.read(_LENGTH), "little")
    if size < _LENGTH or length > min(size - _LENGTH, _HEADER_AT_MOST):
      raise _damaged(path, "its header is cut off")
    text = file.read(length)
  try:
    entries = json.loads(text, object_pairs_hook=unique_keys)
    found = {name: _entry(value) for name, value in entries.items() if name != _METADATA}
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    raise _damaged(path, "its header is not what the format says") from None
  return dict(_located(path, found, _LENGTH + length, size))


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object. Raises ValueError where it has a key twice, of which Python takes the last."""
  found = dict(pairs)
  if len(found) < len(pairs):
    raise ValueError("a key is there twice")
  return found


def _entry(value: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
  dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
  if type(dtype) is not str or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
    raise ValueError
  return dtype, tuple(shape), begin, end


def _located(path, found, data: int, size: int) -> Iterable[tuple[str, StoredTensor]]:
  """Checks that the tensors follow one another without a gap to the end of the file."""
  expected = 0
  for name, (dtype, shape, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
    if dtype not in DTYPES:
      raise ValueError(f"{path}: tensor {name} has dtype {dtype}, known are {sorted(DTYPES)}.")
    header = Header(dtype, shape)
    if begin != expected or end - begin != header.bytes:
      raise _damaged(path, f"tensor {name} does not lie where its shape says")
    expected = end
    yield name, StoredTensor(path, header, data + begin)
  if data + expected != size:
    raise _damaged(path, f"it has {size} bytes and its tensors need {data + expected}")


def _damaged(path: pathlib.Path, why: str) -> ValueError:
  return ValueError(f"{path} is not a readable safetensors file: {why}.")


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """All tensors of a file by name. Raises as `read_headers`."""
  return {name: tensor.whole() for name, tensor in read_headers(path).items()}


def write_header(path: pathlib.Path, entries: Mapping[str, Header]) -> dict[str, int]:
  """Makes a file of its whole size that holds no tensor yet. Returns where each begins."""
  described, end = {}, 0
  for name, header in entries.items():
    described[name] = {
      "dtype": header.dtype,
      "shape": list(header.shape),
      "data_offsets": [end, end + header.bytes],
    }
    end += header.bytes
  text = json.dumps({_METADATA: {"format": "pt"}, **described}, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _LENGTH)  # so that the tensors begin at a multiple of 8
  data = _LENGTH + len(text)
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(_LENGTH, "little") + text)
    file.truncate(data + end)
  return {name: data + entry["data_offsets"][0] for name, entry in described.items()}


def write_safetensors(
  path: pathlib.Path,
  entries: Mapping[str, Header],
  pieces: Iterable[tuple[str, np.ndarray]],
) -> None:
  """Writes a file and makes it durable; one piece of a tensor is in memory.

  Args:
    path: replaced if it exists.
    entries: tensors in the order of the file.
    pieces: (name, values); those of a tensor in order, cut along its first axis.

  Raises: ValueError if the pieces of a tensor are not the whole of it.
  """
  written = dict.fromkeys(entries, 0)
  begins = write_header(path, entries)
  with open(path, "r+b") as file:
    for name, piece in pieces:
      piece = np.ascontiguousarray(piece, DTYPES[entries[name].dtype])
      file.seek(begins[name] + written[name])
      file.write(piece.reshape(-1).view(np.uint8).data)
      written[name] += piece.nbytes
    file.flush()
    os.fsync(file.fileno())
  for name, header in entries.items():
    if written[name] != header.bytes:
      raise ValueError(f"Tensor {name} has {written[name]} bytes instead of {header.bytes}.")
