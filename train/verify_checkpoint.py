"""A checkpoint against another one, or against the stored traces of a reference case.

Both run in float32 on the same tokens, layer by layer, and the first one takes the choices of the
second (entries, candidate pool, experts), so that a rounding that flips a choice is seen where it
happens and not in everything behind it. Exit code 1 where the logits are not close enough.
Legend: B rows, S slots, V vocabulary.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from data.errors import DataError
from data.pipeline import open_validation
from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import Document, Layout, build_layout, real_slots, stack_layouts
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
from train.compare import NOT_TRACES, compare, logit_agreement, same_width
from train.errors import Exit, UsageError
from train.reference_case import NUMERICS, CaseError, load_case, outputs_file, run_case, traces
from train.stored_model import StoredModel, open_model

MEAN_KL_AT_MOST, COSINE_AT_LEAST = 1e-3, 0.999  # of a trained model's logits, our choice
ENTRIES, EXPERTS = ".indexer.topk", ".ffn.router_experts"
CHOICES = (ENTRIES, EXPERTS, ".indexer.pool")
_ROWS = 2  # at least; every device has one
_SLOTS, _SEED = 256, 0  # of tokens that are drawn where no prepared data are known
# Of the model's configuration, what says how it computes and not what it is.
_FREE = ("numerics", "scan_layers", "remat", "init_std")


class Compared(NamedTuple):
  """Two forwards of the same tokens, by trace."""

  name: str
  numerics: str
  layers: int
  ours: dict[str, np.ndarray]
  theirs: dict[str, np.ndarray]
  agreement: dict[str, float]  # of the logits


def main(argv: Sequence[str]) -> int:
  """Prints a table of differences. Returns the exit code; raises UsageError."""
  parser = argparse.ArgumentParser("python -m train verify", description=__doc__)
  parser.add_argument("--checkpoint", required=True, metavar="A",
                      help="a run folder, a step of one, or a released checkpoint")  # fmt: skip
  parser.add_argument("--against", required=True, metavar="B",
                      help="another one, or the folder of a reference case")  # fmt: skip
  parser.add_argument("--numerics", choices=sorted(n for n in NUMERICS if n != "bf16"),
                      default="fp32", help="what is rounded; default fp32: nothing")  # fmt: skip
  parser.add_argument("--devices", type=int, default=jax.device_count(), metavar="N",
                      help="of this process, that share the parameters; default all")  # fmt: skip
  parser.add_argument("--output", type=pathlib.Path, metavar="F.json")
  arguments = parser.parse_args(argv)
  if not 1 <= arguments.devices <= jax.device_count():
    parser.error(f"--devices must be 1 to {jax.device_count()}, got {arguments.devices}")
  model = open_model("--checkpoint", arguments.checkpoint)
  against = pathlib.Path(arguments.against)
  if any(against.glob("outputs*.safetensors")):
    compared = _against_case(model, against, arguments.numerics)
  else:
    other = open_model("--against", arguments.against)
    mesh = _mesh(arguments.devices)
    compared = _against_checkpoint(model, other, arguments.numerics, mesh)
  _show(compared)
  if arguments.output:
    try:
      arguments.output.write_text(json.dumps(_as_json(compared), indent=1, allow_nan=False) + "\n")
    except OSError as error:
      reason = f"--output {arguments.output} cannot be written: {error.strerror}."
      raise UsageError([reason]) from None
  return _judge(compared.agreement)


def _show(compared: Compared) -> None:
  """A row for each layer: its streams, and how many of its choices are the same."""
  table = Table(title=f"{compared.name} ({compared.numerics})", title_justify="left")
  for column in ("layer", "streams, relative", "cosine", "entries alike", "experts alike"):
    table.add_column(column, justify="right")
  ours, theirs = compared.ours, compared.theirs
  percent = lambda share: "" if share is None else f"{100 * share:.1f}%"
  for layer in range(compared.layers):
    name = f"layers.{layer}"
    streams = f"{name}.streams"
    if streams in ours and streams in theirs:
      difference = compare(streams, ours[streams], theirs[streams], None)
      numbers = f"{difference.relative:.2e}", f"{_cosine(ours[streams], theirs[streams]):.6f}"
    else:
      numbers = "", ""
    entries, experts = (
      percent(_alike(ours.get(f"{name}{choice}"), theirs.get(f"{name}{choice}")))
      for choice in (ENTRIES, EXPERTS)
    )
    table.add_row(str(layer), *numbers, entries, experts)
  Console().print(table)
  text = "  ".join(f"{key} {value:.3g}" for key, value in compared.agreement.items())
  print(f"logits: {text}")


def _alike(ours: np.ndarray | None, theirs: np.ndarray | None) -> float | None:
  """Share of queries with the same choice; a choice that is shorter ends with -1."""
  if ours is None or theirs is None:
    return None
  width = max(ours.shape[-1], theirs.shape[-1])
  ours, theirs = (same_width(choice, width) for choice in (ours, theirs))
  return float(np.mean(np.all(ours == theirs, axis=-1)))


def _cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
  a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
  return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _as_json(compared: Compared) -> dict:
  """As `verify` writes it: cases.{case}.{trace}; numbers that are not finite are null."""
  finite = lambda number: number if np.isfinite(number) else None
  record = {}
  for name, theirs in compared.theirs.items():
    if name in compared.ours:
      d = compare(name, compared.ours[name], theirs, None)
      numbers = {"max_abs": finite(d.max_abs), "relative": finite(d.relative)}
      record[name] = numbers | {"identical": d.identical}
  for key, value in compared.agreement.items():
    record.setdefault("logits", {})[key] = finite(value)
  return {
    "cases": {compared.name: record},
    "numerics": {compared.numerics: {compared.name: record}},
  }


def _judge(agreement: dict[str, float]) -> int:
  mean_kl, cosine = agreement["mean_kl"], agreement["cosine"]
  close = mean_kl <= MEAN_KL_AT_MOST and cosine >= COSINE_AT_LEAST  # False for NaN
  print(
    f"mean KL {mean_kl:.3g} (at most {MEAN_KL_AT_MOST:g}), cosine {cosine:.6f} (at least "
    f"{COSINE_AT_LEAST:g}): {'close enough' if close else 'NOT close enough'}."
  )
  return Exit.DONE if close else Exit.CHECK_FAILED


def _against_case(model: StoredModel, folder: pathlib.Path, numerics: str) -> Compared:
  if not outputs_file(folder, numerics).is_file():
    raise UsageError([f"--against {folder} has no outputs for --numerics {numerics}."])
  try:
    case = load_case(folder, numerics)
  except CaseError as error:
    raise UsageError([str(error)]) from None
  _check_same(model.cfg, case.cfg)
  # A case has one row of some tokens, which devices cannot share.
  case = dataclasses.replace(case, variables=model.variables(_mesh(1)))
  ours = run_case(case, site_by_site=False, replayed=CHOICES)
  theirs = {n: trace for n, trace in case.recorded.items() if not n.startswith(NOT_TRACES)}
  agreement = logit_agreement(ours["logits"], theirs["logits"])
  return Compared(case.name, numerics, case.cfg.num_layers, ours, theirs, agreement)


def _mesh(devices: int) -> Mesh:
  return make_mesh(MeshConfig(fsdp=devices), jax.devices()[:devices])


def _against_checkpoint(
  model: StoredModel, other: StoredModel, numerics: str, mesh: Mesh
) -> Compared:
  _check_same(model.cfg, other.cfg)
  cfg = dataclasses.replace(other.cfg, numerics=NUMERICS[numerics], remat="none")
  if problems := cfg.problems():  # widths that the rounding of --numerics cannot have
    raise UsageError(problems)
  layout, source = _tokens(cfg, (model, other), max(_ROWS, mesh.size))
  print(f"Compared on {source}.")
  with jax.set_mesh(mesh):  # one model at a time is on the devices
    theirs = traces(cfg, other.variables(mesh), layout, {})
    fed = {name: value for name, value in theirs.items() if name.endswith(CHOICES)}
    ours = traces(cfg, model.variables(mesh), layout, fed)
  real_BS = np.asarray(real_slots(layout))
  agreement = logit_agreement(ours["logits"][real_BS][None], theirs["logits"][real_BS][None])
  return Compared("checkpoint", numerics, cfg.num_layers, ours, theirs, agreement)


def _check_same(ours: ModelConfig, theirs: ModelConfig) -> None:
  """Raises UsageError naming every section in which two models differ."""
  names = [field.name for field in dataclasses.fields(ours) if field.name not in _FREE]
  problems = [
    f"model.{name} is {getattr(ours, name)} in --checkpoint and {getattr(theirs, name)} in "
    "--against."
    for name in names
    if getattr(ours, name) != getattr(theirs, name)
  ]
  if problems:
    raise UsageError(problems)


def _tokens(cfg: ModelConfig, models: Sequence[StoredModel], row_count: int) -> tuple[Layout, str]:
  """Rows of a run's validation data where they are there, else random tokens; and which."""
  engram = cfg.engram if cfg.engram.layers else None
  for model in models:
    if model.settings is not None and model.settings.data.paths:
      data = dataclasses.replace(model.settings.data, batch_rows=row_count)
      try:
        batches = open_validation(data, ratios=cfg.ratios, engram=engram, host=0, hosts=1)
        layout = next(iter(batches)).layout
      except (DataError, ValueError, OSError, StopIteration):
        continue
      return layout, f"{row_count} rows of the validation data in {', '.join(data.paths)}"
  # Any map of tokens to classes will do: both read the same rows of a table.
  classes_V = np.arange(cfg.vocab, dtype=np.int32) % max(1, cfg.engram.compressed_vocab)
  hashing = None if engram is None else NgramHash(engram, classes_V)
  drawn_BS = np.random.default_rng(_SEED).integers(0, cfg.vocab, (row_count, _SLOTS), np.int32)
  rows = [
    build_layout([Document(ids_S)], slots=_SLOTS, ratios=cfg.ratios, hashing=hashing)
    for ids_S in drawn_BS
  ]
  return stack_layouts(rows), f"{row_count} rows of {_SLOTS} random tokens"
