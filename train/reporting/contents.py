"""What a report says, and in which order."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.base import UNITS
from configs.schema import Settings
from deepseek_jax.flops import activated_parameters, parameters
from train import stage_table, stages
from train.evaluate_loss import BASELINE, MODEL
from train.keys import flatten
from train.reporting import curves, maps, serving_cost
from train.reporting.by_place import by_place
from train.reporting.page import Page, Section, Setting, Table
from train.reporting.results import Results
from train.reporting.run_data import RunData

_ROWS = 12  # of the table of steps
_STEP_COLUMNS = {
  "tokens": "{:,.0f}",
  "loss": "{:.4f}",
  MODEL: "{:.4f}",
  "grad_norm": "{:.4g}",
  "lr": "{:.3g}",
  "tokens_per_second": "{:,.0f}",
}
_EMPTY = "–"


def make_page(run: RunData, results: Results) -> Page:
  """Draws everything; call it inside drawing.style."""
  return Page(
    name=run.folder.name or str(run.folder),
    about=_about(run),
    facts=_facts(run),
    notes=run.notes,
    sections=_sections(run, results),
    settings={"Configuration": _configuration(run), "Environment": _environment(run)},
  )


def _sections(run: RunData, results: Results) -> list[Section]:
  none = "metrics.jsonl has nothing of this."
  chosen = [*maps.expert_load(run), *curves.routing(run), *maps.selection(run)]
  chosen += curves.indexers(run)
  sections = [
    Section("Training", [*curves.training(run)], _steps(run), none),
    Section("Speed", [*curves.speed(run)], missing=none),
    Section("Experts and selection", chosen, missing=none),
    Section("Gradients", [*curves.gradients(run)], missing=none),
    Section("Condition of the layers", [*curves.condition(run)], missing=none),
  ]
  if replayed := [*curves.serving(run)]:
    sections.append(Section("Replay and serving", replayed))
  sections.append(
    Section(
      "Evaluation",
      [*maps.tables(results.maps), *by_place(results.curves)],
      _results(results),
      "No results were given; `python -m train evaluate --output results.json` makes them and "
      "--results results.json puts them here.",
    )
  )
  return sections + _cost(run)


def _cost(run: RunData) -> list[Section]:
  if run.settings is None:
    return [Section("Cost of serving", missing="The configuration of the run is not known.")]
  cfg = run.settings.model
  rows = serving_cost.numbers(cfg)
  head = ["context", *next(iter(rows.values()))]
  table = Table(head, [[name, *row.values()] for name, row in rows.items()])
  return [Section("Cost of serving", [*serving_cost.cache(cfg), *serving_cost.flops(cfg)], [table])]


def _about(run: RunData) -> str:
  verb = str(run.start.get("verb", "a run"))
  parts = [f"{verb} in {run.folder}"]
  if run.settings is not None:
    cfg = run.settings.model
    total, active = parameters(cfg)["total"], activated_parameters(cfg)["decode"]
    parts.append(f"{total:,} parameters, {active:,} of them active for a token")
    parts.append(f"{cfg.num_layers} layers")
  return "; ".join(parts) + "."


def _facts(run: RunData) -> list[tuple[str, str, str]]:
  metrics = run.metrics
  if not len(metrics.steps_N):
    return []
  last, total = int(metrics.steps_N[-1]), run.settings and run.settings.total_steps
  facts = [("steps", f"{last:,}", f"of {total:,}" if total else "")]
  if (tokens := metrics.last("tokens")) is not None:
    facts.append(("tokens", f"{tokens:,.0f}", ""))
  if (loss := metrics.last("loss")) is not None:
    facts.append(("training loss", f"{loss:.4f}", "nats a token, last step"))
  if (bits := metrics.last(MODEL)) is not None:
    bigram = metrics.last(BASELINE)
    facts.append(
      ("validation", f"{bits:.4f}", f"bits per byte{f', bigram {bigram:.4f}' if bigram else ''}")
    )
  rate = metrics.get("tokens_per_second")
  if metrics.has("tokens_per_second"):
    facts.append(("throughput", f"{np.nanmedian(rate):,.0f}", "tokens/s, median step"))
  if metrics.has("step_seconds"):
    facts.append(("time in steps", _duration(np.nansum(metrics.get("step_seconds"))), ""))
  facts.append(("restarts", f"{len(run.restarts):,}", _after(run.restarts)))
  if skipped := metrics.last("skipped_steps"):
    facts.append(("skipped steps", f"{skipped:,.0f}", "loss or gradient was not finite"))
  if damaged := metrics.last("damaged_records"):
    facts.append(("damaged records", f"{damaged:,.0f}", "left out"))
  kept = ", ".join(f"{step:,}" for step in run.checkpoints[-4:])
  facts.append(("checkpoints", f"{len(run.checkpoints):,}", f"steps {kept}" if kept else ""))
  return facts


def _after(steps: list[int]) -> str:
  return f"after step {', '.join(f'{step:,}' for step in steps[-4:])}" if steps else ""


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours:,} h {minutes} min"
  return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _steps(run: RunData) -> list[Table]:
  """Steps with a validation, or evenly spaced ones, and the last."""
  metrics, tables = run.metrics, []
  columns = [name for name in _STEP_COLUMNS if metrics.has(name)]
  if len(metrics.steps_N) and columns:
    (places,) = np.nonzero(np.isfinite(metrics.get(MODEL)))
    places = places if len(places) else np.arange(len(metrics.steps_N))
    places = np.append(places, len(metrics.steps_N) - 1)
    chosen = np.unique(places[np.linspace(0, len(places) - 1, _ROWS).astype(int)])
    rows = [
      [
        f"{metrics.steps_N[place]:,}",
        *(_number(float(metrics.get(name)[place]), _STEP_COLUMNS[name]) for name in columns),
      ]
      for place in chosen
    ]
    tables.append(Table(["step", *(name.replace("_", " ") for name in columns)], rows))
  if run.settings is not None and run.settings.stages:
    head, *rows = stage_table.rows(stages.resolve(run.settings))
    tables.append(Table(head, rows))
  return tables


def _results(results: Results) -> list[Table]:
  if not results.numbers:
    return []
  rows = [
    [name, *(_value(value) for value in values)] for name, values in sorted(results.numbers.items())
  ]
  return [Table(["metric", *results.sources], rows)]


def _number(value: float, form: str) -> str:
  return form.format(value) if np.isfinite(value) else _EMPTY


def _value(value: Any) -> str:
  if value is None:
    return _EMPTY
  return f"{value:.5g}" if isinstance(value, float) else str(value)


def _configuration(run: RunData) -> list[Setting]:
  """As stored, with units, and with what differs from the defaults marked."""
  defaults = flatten(json.loads(json.dumps(dataclasses.asdict(Settings()))))
  return [
    Setting(key, _json(value), UNITS.get(key, ""), key not in defaults or value != defaults[key])
    for key, value in run.config.items()
  ]


def _environment(run: RunData) -> list[Setting]:
  start = {f"start.{name}": value for name, value in run.start.items()}
  values = _flat(run.environment) | _flat(start)
  return [Setting(name, _json(value), "", False) for name, value in values.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in values.items():
    nested = isinstance(value, Mapping)
    flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
  return flat


def _json(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
