"""A stored reference case: its files, our forward on it, and the comparison trace by trace.

A case is a folder with config.json, weights.safetensors and outputs*.safetensors in released names
(a README beside the cases lists the traces). Legend: B rows, S tokens, N entries, V vocabulary.
"""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepseek_jax.checkpoint.released import load_released
from deepseek_jax.checkpoint.released_config import released_config
from deepseek_jax.checkpoint.released_parts import NOT_BACKBONE
from deepseek_jax.checkpoint.safetensors_file import read_headers, read_safetensors
from deepseek_jax.config import ModelConfig, NumericsConfig
from deepseek_jax.layout import PADDING, Document, Layout, build_layout, stack_layouts
from deepseek_jax.model import Model, logits
from deepseek_jax.ngram import NgramHash

_OFF = {"window_fp8": False, "main_fp4": False, "indexer_fp4": False}
_ON = {"window_fp8": True, "main_fp4": True, "indexer_fp4": True}
NUMERICS = {
  "fp32": NumericsConfig(compute_dtype="float32", **_OFF),
  "fp32_qat": NumericsConfig(compute_dtype="float32", **_ON),
  "fp32_actqat": NumericsConfig(compute_dtype="float32", activations_fp8=True, **_ON),
  "bf16": NumericsConfig(compute_dtype="bfloat16", scores_bf16=True, **_ON),
}


class CaseError(Exception):
  """A case that cannot be run; the message is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Case:
  name: str
  cfg: ModelConfig
  variables: dict  # {"params", "balance"}, float32, unrolled layers
  recorded: dict[str, np.ndarray]
  compressed_id: np.ndarray | None
  quantized: bool  # weights are stored in FP8 or FP4

  @property
  def has_images(self) -> bool:
    return "token_types" in self.recorded


def outputs_file(folder: pathlib.Path, numerics: str) -> pathlib.Path:
  suffix = "" if numerics == "bf16" else f"_{numerics}"
  return folder / f"outputs{suffix}.safetensors"


def load_case(folder: pathlib.Path, numerics: str) -> Case:
  """Reads a case; raises CaseError naming what is missing, unused or misshapen."""
  for name in ("config.json", "weights.safetensors"):
    if not (folder / name).is_file():
      raise CaseError(f"{folder} is not a reference case: it has no {name}.")
  try:
    values = json.loads((folder / "config.json").read_text())
    quantized = "quantization_config" in values
    numbers = NUMERICS[numerics]
    if quantized and numerics == "bf16":  # the released code quantizes activations there
      numbers = dataclasses.replace(numbers, activations_fp8=True)
    cfg = released_config(values, numerics=numbers, scan_layers=False, remat="none")
    if problems := cfg.problems():
      raise CaseError(f"{folder / 'config.json'}: {' '.join(problems)}")
    recorded = read_safetensors(outputs_file(folder, numerics))
    _check_input_ids(folder, recorded)
    weights = read_headers(folder / "weights.safetensors")
    variables = load_released(weights, cfg, ignore=NOT_BACKBONE)
  except (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
  ) as error:
    # A case is input, and whatever its files hold is the user's to mend.
    raise CaseError(f"{folder}: {type(error).__name__}: {error}") from None
  hashing = _hashing(folder, cfg)
  return Case(folder.name, cfg, variables, recorded, hashing and hashing.compressed_id, quantized)


def _check_input_ids(folder: pathlib.Path, recorded: dict[str, np.ndarray]) -> None:
  ids = recorded.get("input_ids")
  if ids is None:
    raise CaseError(f"{folder}: the outputs lack input_ids.")
  if ids.ndim != 2 or ids.dtype.kind not in "iu":
    found = f"{ids.dtype}{list(ids.shape)}"
    raise CaseError(f"{folder}: input_ids must be integers [rows, tokens], got {found}.")


def _hashing(folder: pathlib.Path, cfg: ModelConfig) -> NgramHash | None:
  if not cfg.engram.layers:
    return None
  path = folder / "compressed_map.json"
  if not path.is_file():
    raise CaseError(f"{folder} has Engram layers but no compressed_map.json.")
  return NgramHash(cfg.engram, np.asarray(json.loads(path.read_text())["compressed_map"], np.int32))


def slots_for(length: int, ratios) -> int:
  """The next multiple of every ratio."""
  step = int(np.lcm.reduce(ratios)) if ratios else 1
  return -(-length // step) * step


def _layout(cfg: ModelConfig, ids_BS, types_BS, hashing) -> Layout:
  """One document per row, padded to a multiple of every ratio."""
  slots = slots_for(ids_BS.shape[1], cfg.ratios)
  rows = []
  for row, ids_S in enumerate(ids_BS):
    modality = None if types_BS is None else types_BS[row]
    document = Document(ids_S, modality=modality)
    rows.append(build_layout([document], slots=slots, ratios=cfg.ratios, hashing=hashing))
  return stack_layouts(rows)


def run_case(
  case: Case, *, site_by_site: bool, replayed: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
  """Our traces by reference name.

  With site_by_site every recorded value takes the place of ours after it was noted, so that each
  site is fed with recorded inputs. Otherwise only recorded embeddings of image spans are put in,
  and traces whose names end as `replayed` says.
  """
  hashing = None
  if case.compressed_id is not None:
    hashing = NgramHash(case.cfg.engram, case.compressed_id)
  ids_BS, types_BS = case.recorded["input_ids"], case.recorded.get("token_types")
  layout = _layout(case.cfg, ids_BS, types_BS, hashing)
  chosen = lambda name: site_by_site or name.endswith(replayed)
  fed = {name: value for name, value in case.recorded.items() if chosen(name)}
  if case.has_images:
    fed["embed_out"] = case.recorded["embed_out"]
  return _cut(traces(case.cfg, case.variables, layout, fed), case)


def traces(cfg: ModelConfig, variables: Any, layout: Layout, fed: dict) -> dict[str, np.ndarray]:
  """Every tapped value and the logits by name; values of `fed` take the place of ours."""
  rows = len(layout.tokens)

  @jax.jit
  def forward(variables, layout, fed):
    ours = {}

    def tap(name, value):
      ours[name] = value
      recorded = fed.get(name)
      return value if recorded is None else _put(name, recorded, value, rows)

    output: Any = Model(cfg, tap=tap).apply(variables, layout)
    ours["logits"] = logits(output)
    return ours

  with jax.default_matmul_precision("highest"):  # accelerators shorten float32 operands otherwise
    return jax.tree.map(np.asarray, forward(variables, layout, fed))


def _put(name: str, recorded, value, rows: int):
  """The recorded array in the place of ours, where padding slots or cells may follow."""
  fill = PADDING if name.endswith(".topk") else 0
  if name.endswith((".router_experts", ".router_weights")):  # [B*S, k], so padding lies inside
    split = lambda x: x.reshape(rows, -1, x.shape[-1])
    return _put("", split(recorded), split(value), rows).reshape(value.shape)
  grow = [(0, ours - theirs) for ours, theirs in zip(value.shape, recorded.shape, strict=True)]
  return jnp.pad(recorded, grow, constant_values=fill).astype(value.dtype)


def _cut(ours, case: Case) -> dict[str, np.ndarray]:
  """Drops padding slots and empty cells, and turns pools into masks over entries."""
  out = {}
  rows, length = case.recorded["input_ids"].shape
  for name, value in ours.items():
    if name.endswith((".router_experts", ".router_weights")):
      value = value.reshape(rows, -1, value.shape[-1])[:, :length].reshape(rows * length, -1)
    elif name.endswith(".indexer.pool"):
      name = name.removesuffix("pool") + "candidates"
      value = pool_mask(value[:, :length], length, case)
    elif name.endswith(".indexer.topk"):
      value = value[:, :length]
    elif (recorded := case.recorded.get(name)) is not None:
      value = _without_padding(value, recorded.shape, length, case.cfg.ratios)
    out[name] = value
  return out


def _without_padding(value: np.ndarray, shape, length: int, ratios) -> np.ndarray:
  """Cuts the axes that are longer than recorded by padding slots, or by the entries of these."""
  slots = slots_for(length, ratios)
  padded = {(slots, length), *((slots // m, length // m) for m in ratios)}
  if value.ndim != len(shape) or any(
    ours != theirs and (ours, theirs) not in padded
    for ours, theirs in zip(value.shape, shape, strict=True)
  ):
    return value
  return value[tuple(slice(size) for size in shape)]


def pool_mask(pool_BSW: np.ndarray, entries: int, case: Case) -> np.ndarray:
  """bool [B, S, N]: whether an entry lies in one of the pool's blocks."""
  block_N = np.arange(entries) // case.cfg.indexer.pool_block_size
  return (pool_BSW[..., None] == block_N).any(axis=2)
