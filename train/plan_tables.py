"""Prints a plan: short tables, sizes in words that a person reads."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.plan_parts import NOT_BUILT

_NARROW = 110  # columns where the output is no terminal
_PARTS = {
  "backbone": "backbone",
  "vision": "  vision, a part of it",
  "engram": "Engram tables",
  "drafter": "drafter",
  "total": "total",
  "in_training_state": "in the training state",
}
_SHOWN_CONTEXTS = (2**12, 2**14, 2**16, 2**18, 2**20)


def show(plan: Mapping[str, Any]) -> None:
  """Prints every part that the plan has; see `train.plan` for what those are."""
  console = Console(width=None if sys.stdout.isatty() else _NARROW, highlight=False)
  console.print(_parameters(plan))
  console.print(_cache(plan["kv_bytes_per_token"]))
  console.print(_cost(plan))
  console.print(_imbalance(plan["indexer_imbalance"]))
  if "claims" in plan:
    console.print(_claims(plan["claims"]))
  if "compiled" in plan:
    _compiled(console, plan["compiled"])


def _parameters(plan: Mapping[str, Any]) -> Table:
  table = _table("Parameters", "part", "count")
  for part, count in plan["parameters"].items():
    if part in NOT_BUILT and not count:
      continue
    note = " (by formula, not built yet)" if part in NOT_BUILT else ""
    table.add_row(f"{_PARTS[part]}{note}", f"{count:,}")
  for phase, count in plan["activated_parameters"].items():
    table.add_row(f"activated for a token, {phase}", f"{count:,}")
  return table


def _cache(sizes: Mapping[str, float]) -> Table:
  table = _table("Key-value cache of a served model", "part", "bytes per token")
  names = {
    "main": "entries",
    "indexer": "indexer keys",
    "global": "global cache, the sum",
    "window_per_layer": "window of one layer, while a token is in it",
  }
  for key, value in sizes.items():
    table.add_row(names[key], f"{value:,.6g}")
  return table


def _cost(plan: Mapping[str, Any]) -> Table:
  modes = plan["flops_per_token"]
  table = _table("Model GFLOPs per token", "context", *modes, "prefill ratio")
  for context in _SHOWN_CONTEXTS:
    row = [f"{modes[mode][context] / 1e9:,.4g}" for mode in modes]
    table.add_row(f"{context // 1024:,}K", *row, f"{plan['prefill_ratio'][context]:.4f}")
  return table


def _imbalance(shards: Mapping[int, float]) -> Table:
  title = "Indexer scores of the busiest context shard over the mean, 1M tokens"
  table = _table(title, *(f"{count} shards" for count in shards))
  table.add_row(*(f"{ratio:.3f}" for ratio in shards.values()))
  return table


def _claims(claims: Sequence[Mapping[str, Any]]) -> Table:
  table = _table("Published figures of the release", "quantity", "stated", "computed", "")
  for claim in claims:
    verdict = "" if claim["holds"] else "DIFFERS"
    table.add_row(claim["quantity"], claim["stated"], _number(claim["computed"]), verdict)
  return table


def _compiled(console: Console, compiled: Mapping[str, Any]) -> None:
  axes = ", ".join(f"{axis} {size}" for axis, size in compiled["mesh"].items() if size > 1)
  title = f"Training step on {compiled['topology']}: compiled, never run"
  table = _table(title, "quantity", "value")
  table.add_row("devices", f"{compiled['devices']:,} ({axes or 'one'})")
  table.add_row("arguments per device", _size(compiled["argument_bytes"]))
  table.add_row("temporaries per device", _size(compiled["temporary_bytes"]))
  table.add_row("memory of a device", _size(compiled["memory_bytes"]))
  table.add_row(f"fits into {compiled['usable']:.0%} of it", "yes" if compiled["fits"] else "NO")
  table.add_row("compile time", f"{compiled['compile_seconds']:.1f} s")
  for kind, total in compiled["collectives"].items():
    table.add_row(f"{kind} in a step", f"{total['count']:,} of {_size(total['bytes'])} together")
  console.print(table)
  if compiled["refusal"]:
    console.print(f"The compiler did not finish: {compiled['refusal']}", markup=False)


def _table(title: str, *columns: str) -> Table:
  table = Table(title=title, title_justify="left")
  for number, column in enumerate(columns):
    table.add_column(column, justify="right" if number else "left")
  return table


def _number(value: float) -> str:
  return f"{value:,.0f}" if value == int(value) or value >= 1e6 else f"{value:,.5g}"


def _size(size: int | None) -> str:
  if size is None:
    return "not known"
  unit = next(unit for unit in (30, 20, 10) if size >= 2**unit or unit == 10)
  return f"{size / 2**unit:,.2f} {'KMG'[unit // 10 - 1]}iB"
