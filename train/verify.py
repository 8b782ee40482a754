"""`python -m train verify`: our forward against stored traces of the official reference code."""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from train.compare import BOUNDS, NOT_TRACES, Difference, compare, inputs_of, logit_agreement
from train.number_vectors import recompute
from train.reference_case import NUMERICS, Case, CaseError, load_case, outputs_file, run_case
from train.reference_decoding import LOGITS, run_decoding_case
from train.replay_case import is_replay, run_replay_case

_DRAFTER = "mtp.", "draft_"  # traces that need the drafter, which is separate work


def main(argv: list[str]) -> int:
  """Prints a table per case; returns 0, 1 where a bound is exceeded, 2 for wrong usage."""
  if any(word.partition("=")[0] in ("--checkpoint", "--against") for word in argv):
    from train import verify_checkpoint  # only now: it loads the libraries of a run

    return verify_checkpoint.main(argv)
  parser = argparse.ArgumentParser(
    "python -m train verify",
    description=__doc__,
    epilog="verify --checkpoint A --against B compares checkpoints; see its --help.",
  )
  parser.add_argument("--reference", type=pathlib.Path, required=True, metavar="DIR",
                      help="a case, or a folder of cases")  # fmt: skip
  parser.add_argument("--numerics", choices=sorted(NUMERICS), action="append",
                      help="may be given more than once; default: all of float32")  # fmt: skip
  parser.add_argument(
    "--output", type=pathlib.Path, metavar="F.json", help="also write the numbers"
  )
  arguments = parser.parse_args(argv)
  numerics = arguments.numerics or ["fp32", "fp32_qat", "fp32_actqat"]
  try:
    report = Report()
    for folder in _cases(arguments.reference):
      _verify_case(folder, numerics, report)
  except CaseError as error:
    print(error, file=sys.stderr)
    return 2
  if not report.compared:
    print(f"--reference {arguments.reference} has nothing to compare.", file=sys.stderr)
    return 2
  if arguments.output:
    try:
      arguments.output.write_text(json.dumps(report.as_json(), indent=1, allow_nan=False) + "\n")
    except OSError as error:
      print(f"--output {arguments.output} cannot be written: {error.strerror}.", file=sys.stderr)
      return 2
  return report.finish()


def _cases(folder: pathlib.Path) -> list[pathlib.Path]:
  if not folder.is_dir():
    raise CaseError(f"--reference {folder} is not a folder.")
  is_case = lambda path: (
    (path / "config.json").is_file() or (path / "vectors.safetensors").is_file()
  )
  cases = [folder] if is_case(folder) else sorted(p for p in folder.iterdir() if is_case(p))
  if not cases:
    raise CaseError(
      f"--reference {folder} holds no case (a folder with config.json, weights.safetensors and "
      "outputs files, or with vectors.safetensors)."
    )
  return cases


def _verify_case(folder: pathlib.Path, numerics: list[str], report: "Report") -> None:
  if (folder / "vectors.safetensors").is_file():
    try:
      ours, recorded = recompute(folder / "vectors.safetensors")
    except (ValueError, KeyError, TypeError) as error:
      raise CaseError(f"{folder / 'vectors.safetensors'}: {error}") from None
    # Bytes and decoded values must be equal; the two products may differ by a bfloat16 rounding.
    bound = lambda name: BOUNDS["bf16"] if name.startswith("gemm.") else 0.0
    report.add(folder.name, "bytes", [compare(k, ours[k], recorded[k], bound(k)) for k in ours])
    return
  available = [n for n in numerics if outputs_file(folder, n).is_file()]
  if not available:
    report.skip(folder.name, "/".join(numerics), "it has no outputs of that kind")
  for chosen in available:
    case = load_case(folder, chosen)
    if any(name.startswith(_DRAFTER) for name in case.recorded):
      report.skip(folder.name, chosen, "its traces need the drafter, which is not there yet")
      continue
    last = next((name for name in (LOGITS, "logits") if name in case.recorded), None)
    if last is None:
      raise CaseError(f"{folder}: the outputs for --numerics {chosen} lack logits.")
    if last == LOGITS and chosen == "bf16":
      report.skip(folder.name, chosen, "a cache cannot be fed with recorded values site by site")
      continue
    for name, ours in _forwards(case, last, chosen):
      differences = _differences(folder, case, chosen, ours)
      report.add(name, chosen, differences, logit_agreement(ours[last], case.recorded[last]))


def _forwards(case: Case, last: str, numerics: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
  """Every way in which we compute a case: its name, and our traces."""
  if last != LOGITS:
    yield case.name, run_case(case, site_by_site=numerics == "bf16")
    return
  yield case.name, run_decoding_case(case)
  if is_replay(case.recorded):  # what training sees of it
    yield f"{case.name} as a layout", run_replay_case(case)


def _differences(
  folder: pathlib.Path, case: Case, numerics: str, ours: dict[str, np.ndarray]
) -> list[Difference]:
  differences = []
  for name, recorded in sorted(case.recorded.items(), key=lambda item: _place(item[0])):
    if name.startswith(NOT_TRACES) or (name == "embed_out" and case.has_images):
      continue
    if name not in ours:
      raise CaseError(f"{folder}: our forward has no trace named {name}.")
    if ours[name].shape != recorded.shape and not name.endswith(".topk"):
      raise CaseError(f"{folder}: trace {name} is {recorded.shape}, ours is {ours[name].shape}.")
    differences.append(compare(name, ours[name], recorded, _bound(name, case, numerics)))
  return differences


def _place(name: str) -> tuple:
  """Sorts traces in the order of the forward: embeddings, layers by number, the rest."""
  group = 0 if name == "embed_out" else 1 if name.startswith("layers.") else 2
  return group, [_number(part) for part in name.split(".")]


def _number(part: str) -> tuple[int, str]:
  return (int(part), "") if part.isdigit() else (-1, part)


def _bound(name: str, case, numerics: str) -> float | None:
  """In bfloat16 only a site whose inputs were all recorded says something about itself."""
  if numerics != "bf16":
    return BOUNDS[numerics]
  inputs = inputs_of(name, case.cfg)
  known = inputs is not None and all(i in case.recorded for i in inputs)
  return BOUNDS["bf16"] if known else None


class Report:
  """Collects differences, prints tables, and knows whether a bound was exceeded."""

  def __init__(self):
    self._console = Console(width=None if sys.stdout.isatty() else 110)
    self._runs: dict[tuple[str, str], tuple[list[Difference], dict[str, float]]] = {}
    self._skipped: dict[tuple[str, str], str] = {}

  @property
  def compared(self) -> bool:
    return bool(self._runs)

  def skip(self, case: str, numerics: str, reason: str) -> None:
    self._skipped[case, numerics] = reason
    self._console.print(f"{case} ({numerics}): not compared, {reason}.", highlight=False)

  def add(self, case: str, numerics: str, differences: list[Difference], agreement=None) -> None:
    self._runs[case, numerics] = (differences, agreement or {})
    table = Table(title=f"{case} ({numerics})", title_justify="left")
    for column in ("trace", "largest error", "relative", "integers", "bound", ""):
      table.add_column(column, justify="left" if column in ("trace", "") else "right")
    for d in differences:
      integers = ("equal" if d.identical else "DIFFER") if d.is_integer else ""
      bound = "" if d.held_to is None else ("equal" if d.is_integer else f"{d.held_to:.0e}")
      verdict = "FAIL" if d.fails else ("" if d.held_to is not None else "inputs not recorded")
      error = ("", "") if d.is_integer else (f"{d.max_abs:.2e}", f"{d.relative:.2e}")
      table.add_row(d.name, *error, integers, bound, verdict)
    self._console.print(table)
    if agreement:
      text = "  ".join(f"{k} {v:.3g}" for k, v in agreement.items())
      self._console.print(f"logits: {text}", highlight=False)

  def finish(self) -> int:
    failed = [
      f"{case} ({numerics}) {d.name}"
      for (case, numerics), (differences, _) in self._runs.items()
      for d in differences
      if d.fails
    ]
    compared = sum(d.held_to is not None for ds, _ in self._runs.values() for d in ds)
    cases = len({case for case, _ in self._runs})
    skipped = len({case for case, _ in self._skipped})
    tail = f"; {skipped} not compared" if skipped else ""
    self._console.print(
      f"{compared} traces of {cases} cases compared, {len(failed)} beyond their bound{tail}.",
      highlight=False,
    )
    for name in failed:
      self._console.print(f"beyond its bound: {name}", highlight=False)
    return 1 if failed else 0

  def as_json(self) -> dict:
    """cases.{case}.{trace}: the worst over the numerics run; numerics.{numerics}: each of them."""
    cases: dict[str, dict] = {}
    single: dict[str, dict] = {}
    for (case, numerics), (differences, agreement) in self._runs.items():
      record = {d.name: _as_json(d) for d in differences}
      finite = {k: v if np.isfinite(v) else None for k, v in agreement.items()}
      record.setdefault("logits", {}).update(finite)
      single.setdefault(numerics, {})[case] = record
      merged = cases.setdefault(case, {})
      for name, values in record.items():
        merged[name] = _worse(merged[name], values) if name in merged else dict(values)
    for (case, _), reason in self._skipped.items():
      cases.setdefault(case, {})["not_compared"] = reason
    return {"cases": cases, "numerics": single}


def _as_json(d: Difference) -> dict:
  finite = lambda x: x if np.isfinite(x) else None  # JSON has no infinity
  return {"max_abs": finite(d.max_abs), "relative": finite(d.relative), "identical": d.identical}


_SMALLER_IS_WORSE = {"cosine", "top1", "identical"}


def _worse(a: dict, b: dict) -> dict:
  """The worse of two records, value by value; null (no finite error) is worst."""

  def pick(key):
    x, y = a.get(key), b.get(key)
    if x is None or y is None:
      return None
    return min(x, y) if key in _SMALLER_IS_WORSE else max(x, y)

  return {key: pick(key) for key in a | b}
