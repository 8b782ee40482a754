"""How rows of keys lie in memory: packed as the release serves them, or plain.

Legend: X leading axes, d channels of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from deepseek_jax.config import ModelConfig
from deepseek_jax.ops import number_formats as numbers
from deepseek_jax.ops import quantize

Stored = tuple[jax.Array, ...]  # (codes, scales) [X, bytes], or (values,) [X, d]


class RowFormat(NamedTuple):
  """Reading what was written gives what fake quantization gives, to the bit."""

  write: Callable[[jax.Array], Stored]  # [X, d] before quantization
  read: Callable[[Stored], jax.Array]  # [X, d] in the compute dtype


class RowFormats(NamedTuple):
  window: RowFormat  # 528 B at 512 channels: E4M3, a power of two per 32
  main: RowFormat  # 288 B: E2M1 in nibbles, an E4M3 scale per 16
  index: RowFormat  # 68 B at 128 channels: E2M1, a power of two per 32


def row_formats(cfg: ModelConfig, *, packed: bool) -> RowFormats:
  """The formats of model.md section 3.1.

  Args:
    packed: bytes, for which cfg.numerics must round all three kinds of rows; otherwise rows lie in
      the compute dtype, rounded where cfg.numerics says so.
  """
  dtype, n = jnp.dtype(cfg.numerics.compute_dtype), cfg.numerics
  if not packed:
    return RowFormats(
      window=_plain(quantize.fake_fp8 if n.window_fp8 else None, dtype),
      main=_plain(quantize.fake_main if n.main_fp4 else None, dtype),
      index=_plain(quantize.fake_indexer if n.indexer_fp4 else None, dtype),
    )
  if not (n.window_fp8 and n.main_fp4 and n.indexer_fp4):
    raise ValueError(
      "packed rows need numerics.window_fp8, main_fp4 and indexer_fp4, got "
      f"{n.window_fp8}, {n.main_fp4} and {n.indexer_fp4}."
    )
  e4m3 = numbers.encode_e4m3, numbers.decode_e4m3
  e8m0 = numbers.encode_e8m0, numbers.decode_e8m0
  e2m1 = numbers.pack_e2m1, numbers.unpack_e2m1
  return RowFormats(
    window=_packed(quantize.quantize_fp8, e4m3, e8m0, dtype),
    main=_packed(quantize.quantize_main, e2m1, e4m3, dtype),
    index=_packed(quantize.quantize_indexer, e2m1, e8m0, dtype),
  )


def _plain(rounded: Callable | None, dtype: Any) -> RowFormat:
  rounded = rounded or (lambda x: x)
  return RowFormat(lambda x: (rounded(x).astype(dtype),), lambda stored: stored[0])


def _packed(quantizer: Callable, of_values, of_scales, dtype: Any) -> RowFormat:
  (encode, decode), (encode_scale, decode_scale) = of_values, of_scales

  def write(x_Xd: jax.Array) -> Stored:
    values, scale = quantizer(x_Xd)
    return encode(values), encode_scale(scale)

  def read(stored: Stored) -> jax.Array:
    codes, scale = stored
    return quantize.dequantize(decode(codes), decode_scale(scale)).astype(dtype)

  return RowFormat(write, read)
