"""Tasks that nobody else has: what serving's approximations, and parts of the model, change.

Each is two forwards of one model on the same held-out tokens, in another layout or with a switch.
Legend: R rows, B rows of a call, S encoder slots, T decoder slots, K buckets.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from data.config import ReplayConfig
from data.replay import document_of
from data.source import Row
from deepseek_jax.layout import Layout
from train.errors import UsageError
from train.evaluation import agreement, served_rows
from train.evaluation.agreement import Comparison, Forward
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.served_rows import Plan, RowShape
from train.evaluation.task import Log, Metrics, Task
from train.served import approximations, match_slots

_Compared = tuple[Comparison, Sequence[Row]]
_Sides = Callable[[EvaluatedModel, Layout], tuple[Forward, Forward]]


def early_exit(name: str, rest: str, request: Request) -> Task:
  """Only a window before each response, and the response, enter the decoder.

  Of text the second half of a document counts as a response. By distance from its beginning.
  """
  del rest, request
  return Task(name, agreement.METRICS, _against_exact(_early_exit), _decoder_problems)


def prefix_continued(name: str, rest: str, request: Request) -> Task:
  """Early exit, and responses behind prefixes whose windows were dropped and are computed again.

  By distance from the beginning of the response, not counting those without such a prefix.
  """
  del rest, request
  return Task(name, agreement.METRICS, _against_exact(_continued), _prefix_problems)


def fp4(name: str, rest: str, request: Request) -> Task:
  """Compressed entries in FP4, against the compute dtype; by position in the document."""
  del rest, request
  return _switch("fp4", name)


def pool(name: str, rest: str, request: Request) -> Task:
  """With the candidate pool, against without; by position in the document."""
  del rest, request
  return _switch("pool", name)


def engram(name: str, rest: str, request: Request) -> Task:
  """Without Engram rows, against with them; by position in the document. 0 without a table."""
  del rest, request

  return Task(name, agreement.METRICS, _on_exact_rows(without_engram), data_problems)


def without_engram(model: EvaluatedModel, layout: Layout) -> tuple[Forward, Forward]:
  """With the rows of the tables, and with padding in their place, which adds nothing."""
  none = np.full_like(layout.engram_rows, -1)
  return Forward(model.cfg, layout), Forward(model.cfg, layout._replace(engram_rows=none))


def switched(what: str) -> _Sides:
  """Without and with one of `approximations`."""

  def sides(model: EvaluatedModel, layout: Layout) -> tuple[Forward, Forward]:
    without, with_it = approximations(model.cfg)[what]
    return Forward(without, layout), Forward(with_it, layout)

  return sides


def _switch(what: str, name: str) -> Task:
  def problems(model: EvaluatedModel, request: Request) -> list[str]:
    found = data_problems(model, request)
    if what not in approximations(model.cfg):
      found.append(f"{name}: the sizes of this model do not allow it with and without {what}.")
    return found

  return Task(name, agreement.METRICS, _on_exact_rows(switched(what)), problems)


def data_problems(model: EvaluatedModel, request: Request) -> list[str]:
  del request
  if any(prepared.validation.rows for prepared in model.data):
    return []
  return ["There is no validation part in the data; --data names other folders."]


def _decoder_problems(model: EvaluatedModel, request: Request) -> list[str]:
  found = data_problems(model, request)
  if model.cfg.decoder_start is None:
    found.append("model.decoder_start is none: there is no decoder that tokens could leave out.")
  return found


def _prefix_problems(model: EvaluatedModel, request: Request) -> list[str]:
  found, window = _decoder_problems(model, request), model.cfg.attention.window
  if window % (block := served_rows.hit_multiple(model.cfg)):
    found.append(
      f"model.attention.window is {window}, but copies of a window must be whole blocks of the "
      f"candidate pool, {block} tokens each."
    )
  return found


def row_shape(model: EvaluatedModel) -> RowShape:
  slots = model.slots_of(1, max(prepared.slots for prepared in model.data))
  unit = served_rows.unit(model.cfg, model.mesh.shape["context"])
  return RowShape(model.cfg, model.hashing, slots, unit)


def exact_rows(
  model: EvaluatedModel, rows: Iterable[Row]
) -> Iterator[tuple[Layout, Sequence[Row]]]:
  """Layouts of rows as they are trained on, so many of them at a time, and these rows."""
  shape = row_shape(model)
  count = model.rows_of(shape.slots)
  for some in served_rows.batches(rows, count, Row("", [])):
    yield shape.exact([[document_of(one) for one in row.documents] for row in some]), some


def _on_exact_rows(sides: _Sides) -> Callable:
  """Task.run for two forwards of the rows as they are."""

  def run(model: EvaluatedModel, request: Request, log: Log) -> Metrics:
    rows = served_rows.held_out_rows(model.data, request.limit)
    return compare_sides(model, rows, sides, log)

  return run


def compare_sides(model: EvaluatedModel, rows: Iterable[Row], sides: _Sides, log: Log) -> Metrics:
  """Two forwards of the same layouts, by position in the document."""
  starts = agreement.distances(row_shape(model).slots)
  compared = (
    (Comparison(*sides(model, layout), agreement.by_position(layout, starts)), some)
    for layout, some in exact_rows(model, rows)
  )
  return _measure(model, compared, "position", starts, log)


_PlanOf = Callable[[Row, EvaluatedModel, ReplayConfig, int], Plan]


def _early_exit(row: Row, model: EvaluatedModel, replay: ReplayConfig, seed: int) -> Plan:
  del model, replay, seed
  return served_rows.early_exit(row)


def _continued(row: Row, model: EvaluatedModel, replay: ReplayConfig, seed: int) -> Plan:
  return served_rows.continued(row, replay, model.cfg.attention.window, seed)


def _against_exact(plan_of: _PlanOf) -> Callable:
  """Task.run for rows as a server lays them out."""

  def run(model: EvaluatedModel, request: Request, log: Log) -> Metrics:
    rows = list(served_rows.held_out_rows(model.data, request.limit))
    replay = replay_of(model)
    plans = [plan_of(row, model, replay, request.seed) for row in rows]
    if not any(own for plan in plans for own in plan.turns):
      raise UsageError(["None of the held-out rows has a document that is long enough."])
    return compare_served(model, rows, plans, log)

  return run


def replay_of(model: EvaluatedModel) -> ReplayConfig:
  """As the run has it, with prefixes of whole blocks of the pool."""
  multiple = served_rows.hit_multiple(model.cfg)
  return dataclasses.replace(model.settings.data.replay, hit_multiple=multiple)


def compare_served(
  model: EvaluatedModel, rows: Sequence[Row], plans: Sequence[Plan], log: Log
) -> Metrics:
  """The exact forward of rows against the one that a server makes of their plans."""
  shape = row_shape(model)
  starts = agreement.distances(shape.slots)
  count = model.rows_of(shape.slots)

  def compared() -> Iterator[_Compared]:
    pairs = shape.pairs(plans, replay_of(model), count)
    for pair, some in zip(pairs, served_rows.batches(rows, count, Row("", [])), strict=True):
      match = match_slots(pair.exact, pair.served, agreement.edges(starts))
      exact, served = (Forward(model.cfg, layout) for layout in pair)
      yield Comparison(exact, served, match), some

  return _measure(model, compared(), "distance", starts, log)


def _measure(
  model: EvaluatedModel, compared: Iterator[_Compared], axis: str, starts: list[int], log: Log
) -> Metrics:
  sums_RK5 = []
  for comparison, rows in compared:
    sums_BK5 = agreement.compare(model, comparison, len(starts))
    for row, sums_K5 in zip(rows, sums_BK5, strict=True):
      if row.record:
        log({"record": row.record, **agreement.row_metrics(sums_K5)})
    sums_RK5.append(sums_BK5)
  return agreement.metrics(np.concatenate(sums_RK5), axis, starts)
