"""The byte-level vectors of the number formats, recomputed (reference case quant_vectors)."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.checkpoint.released_formats import decode
from deepseek_jax.checkpoint.safetensors_file import read_safetensors
from deepseek_jax.ops import number_formats as formats
from deepseek_jax.ops import quantize
from deepseek_jax.ops.table_lookup import table_lookup

# Scales of the power-of-two quantizers are tested on their absolute maximum alone.
_FLOORS = {"fp8": (1e-4, formats.E4M3_MAX), "fp4": (6 * 2.0**-126, formats.E2M1_MAX)}


def recompute(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """(ours, recorded) by vector name."""
  recorded = read_safetensors(path)
  v = {name: jnp.asarray(value) for name, value in recorded.items()}
  weight = lambda name, scale: jnp.asarray(decode(recorded[name], recorded[scale]))
  ours: dict[str, jax.Array] = {
    "e4m3.values": formats.decode_e4m3(v["e4m3.codes"]),
    "e8m0.values": formats.decode_e8m0(v["e8m0.codes"]),
    "e2m1.values": formats.decode_e2m1(v["e2m1.codes"]),
    "e4m3_round.codes": formats.encode_e4m3(formats.round_e4m3(v["e4m3_round.input"])),
    "e2m1_round.codes": formats.encode_e2m1(formats.round_e2m1(v["e2m1_round.input"])),
  }
  for name, (floor, largest) in _FLOORS.items():
    amax = jnp.maximum(v["scale_pow2.amax"], floor)
    ours[f"scale_pow2.{name}"] = formats.ceil_power_of_two(amax * jnp.float32(1 / largest))
  ours |= _blocks("fp8_block32", v, quantize.quantize_fp8, formats.encode_e8m0)
  ours |= _blocks("fp4_block32", v, quantize.quantize_indexer, formats.encode_e8m0)
  ours |= _blocks("fp4_block16", v, quantize.quantize_main, formats.encode_e4m3)
  for name in ("weight_fp8", "weight_fp8_ragged", "weight_fp4"):
    ours[f"{name}.dequant"] = weight(f"{name}.weight", f"{name}.scale")
  table = weight("engram_rows.weight", "engram_rows.scale")
  ours["engram_rows.values"] = table_lookup(table, v["engram_rows.rows"], jnp.bfloat16)
  x = quantize.fake_fp8(v["gemm.input"]).astype(jnp.float32)
  exact = lambda w: jnp.dot(x, w.T, precision=jax.lax.Precision.HIGHEST).astype(jnp.bfloat16)
  ours["gemm.fp8_out"] = exact(weight("weight_fp8.weight", "weight_fp8.scale"))
  ours["gemm.fp4_out"] = exact(weight("gemm.fp4_weight", "gemm.fp4_scale"))
  return {k: np.asarray(x) for k, x in ours.items()}, {k: recorded[k] for k in ours}


def _blocks(name: str, v, quantizer, encode_scale) -> dict[str, jax.Array]:
  values, scale = quantizer(v[f"{name}.input"])
  dequantized = quantize.dequantize(values, scale).astype(jnp.bfloat16)
  out = {f"{name}.scales": encode_scale(scale), f"{name}.dequant": dequantized}
  if f"{name}.codes" in v:
    return out | {f"{name}.codes": formats.encode_e4m3(values)}
  return out | {f"{name}.packed": formats.pack_e2m1(values)}
