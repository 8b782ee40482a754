"""How the release stores weights: bytes and power-of-two scales <-> float32, in NumPy on the host.

Source: model.md section 3.6; the formats themselves are in ops/number_formats.py.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from deepseek_jax.checkpoint.released_names import Stored
from deepseek_jax.ops.number_formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX

TILE = 32  # rows and columns of a matrix, or channels of a row, that share a scale

_NIBBLES = np.asarray([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], np.float32)
# Both values of a byte, the even channel first: it is in the low nibble.
_PAIRS = np.stack([_NIBBLES[np.arange(256) & 15], _NIBBLES[np.arange(256) >> 4]], axis=-1)
_LARGEST: dict[Stored, float] = {"fp8": E4M3_MAX, "fp8_rows": E4M3_MAX, "fp4": E2M1_MAX}
_BIAS, _NAN = 127, 255  # of E8M0: byte e means 2^(e - 127)


class Encoded(NamedTuple):
  weight: np.ndarray
  scale: np.ndarray | None  # of a quantized weight


def decode(weight: np.ndarray, scale: np.ndarray | None, first_row: int = 0) -> np.ndarray:
  """Rows of a stored tensor -> float32 values.

  Args:
    weight: plain, or FP8 [rows, in], or packed FP4 [rows, in / 2].
    scale: E8M0 [rows or row tiles, column tiles], None for a plain tensor; the last tile along
      either axis may be cut. A scale per row where there are as many as rows.
    first_row: of the weight in its tensor; row tiles are counted from the tensor's begin and
      `scale` begins with that of this row.

  Raises: ValueError for a scale that is not a number.
  """
  if scale is None:
    return weight.astype(np.float32)
  if weight.dtype == np.int8:
    values = _PAIRS[weight.view(np.uint8)].reshape(len(weight), -1)
  else:
    values = weight.astype(np.float32)
  rows, columns = values.shape
  codes = scale.view(np.uint8)
  if (codes == _NAN).any():
    raise ValueError("a scale is not a number")
  factors = np.ldexp(np.float32(1), codes.astype(np.int32) - _BIAS)
  if len(factors) != rows:
    factors = factors[(first_row + np.arange(rows)) // TILE - first_row // TILE]
  if factors.shape[1] != columns:
    factors = np.repeat(factors, TILE, axis=1)[:, :columns]
  values *= factors
  return values


def encode(values: np.ndarray, stored: Stored) -> Encoded:
  """float32 values -> the stored tensor, rounded to nearest, ties to even.

  A scale is the smallest power of two that brings its block into the range of the format, 1 for a
  block of zeros. Values that are multiples of some power of two in the format come back the same.
  Blocks begin at row 0, so that a part of a tensor must begin at a multiple of 32 rows.
  """
  if stored == "f32":
    return Encoded(values.astype(np.float32), None)
  if stored == "bf16":
    return Encoded(values.astype(ml_dtypes.bfloat16), None)
  rows, columns = values.shape
  tile = TILE if stored == "fp8" else 1
  tiles = -(-rows // tile), -(-columns // TILE)
  blocks = np.zeros((tiles[0], tile, tiles[1], TILE), np.float32)
  padded = blocks.reshape(tiles[0] * tile, tiles[1] * TILE)
  padded[:rows, :columns] = values
  largest = np.abs(blocks).max(axis=(1, 3))
  exponent = _exponent(largest, _LARGEST[stored])
  blocks *= np.ldexp(np.float32(1), -exponent)[:, None, :, None]
  scale = (exponent + _BIAS).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
  quotient = padded[:rows, :columns]
  if stored != "fp4":
    return Encoded(quotient.astype(ml_dtypes.float8_e4m3fn), scale)
  code = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
  return Encoded((code[:, 0::2] | (code[:, 1::2] << 4)).view(np.int8), scale)


def _exponent(largest: np.ndarray, limit: float) -> np.ndarray:
  """ceil(log2(largest / limit)), 0 where largest is 0, within what E8M0 and float32 hold."""
  mantissa, exponent = np.frexp(largest / np.float32(limit))  # mantissa in [0.5, 1)
  exponent = exponent - (mantissa == 0.5)
  return np.where(largest == 0, 0, np.clip(exponent, 1 - _BIAS, _BIAS - 1)).astype(np.int32)
