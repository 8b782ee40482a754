"""Tasks on long text: a table of accuracies over lengths and depths for each kind of riddle.

The answer counts as given if each of its tokens is the likeliest one behind those before it, in one
forward. Legend: L lengths, D depths.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.tasks import long_context
from data.tasks.long_context import Border, Material, Problem, Sizes, Sweep, borders
from data.tasks.real_text import held_out_text
from train.errors import UsageError
from train.evaluation.model import EvaluatedModel, Scored
from train.evaluation.request import Request
from train.evaluation.task import Log, Metrics, Task

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
REPEATS = 4  # problems of a length and depth
METRICS = ("mean_accuracy", "mean_token_accuracy", "mean_log_likelihood")


class _Riddles(NamedTuple):
  name: str  # of the task
  kind: str  # a key of data.tasks.riddles.KINDS
  border: Border
  lengths: tuple[int, ...]  # empty: those of the data


def make(kind: str, border: Border = "anywhere") -> Callable[[str, str, Request], Task]:
  """Of a kind of riddle: a task whose name may go on with lengths in tokens, as in needle:512+4096.

  Without, they are half, once and twice the slots of the data.
  """

  def make_task(name: str, rest: str, request: Request) -> Task:
    del request
    riddles = _Riddles(name, kind, border, _lengths(name, rest))
    run = functools.partial(_run, riddles=riddles)
    return Task(name, METRICS, run, functools.partial(_problems, riddles=riddles))

  return make_task


def _lengths(name: str, rest: str) -> tuple[int, ...]:
  words = rest.split("+") if rest else []
  if not all(word.isdecimal() and int(word) > 0 for word in words):
    raise UsageError([f"--tasks {name}: {rest} is no list of lengths such as 512+4096."])
  return tuple(sorted({int(word) for word in words}))


def _problems(model: EvaluatedModel, request: Request, *, riddles: _Riddles) -> list[str]:
  """Tries the shortest and the longest problems."""
  if riddles.border != "anywhere" and riddles.border not in borders(sizes_of(model)):
    return [f"{riddles.name}: entries and pool blocks of this model have no such border."]
  if not any(prepared.validation.rows for prepared in model.data):
    return [f"{riddles.name}: the data has no validation part; --data names other folders."]
  lengths = riddles.lengths or _default_lengths(model)
  try:
    _draw(model, riddles, Sweep((lengths[0], lengths[-1]), DEPTHS, 1, request.seed))
  except UsageError as error:
    return list(error.problems)
  return []


def _default_lengths(model: EvaluatedModel) -> tuple[int, ...]:
  slots = model.data[0].slots
  return slots // 2, slots, 2 * slots


def sizes_of(model: EvaluatedModel) -> Sizes:
  """Tokens of the widest entry and of a pool block; 1 where there is none."""
  cfg = model.cfg
  source = cfg.indexer.pool_source
  block = 1 if source is None else cfg.indexer.pool_block_size * cfg.compress_ratios[source]
  return Sizes(entry=max(cfg.ratios, default=1), block=block)


def _draw(model: EvaluatedModel, riddles: _Riddles, sweep: Sweep) -> list[Problem]:
  paths = tuple(str(prepared.folder) for prepared in model.data)
  text_N = _text(paths, long_context.REACH * max(sweep.lengths))
  encode = lambda text: model.tokenizer.encode(text, add_special_tokens=False).ids
  material, sizes = Material(text_N, encode, model.data[0].bos), sizes_of(model)
  try:
    return list(long_context.problems(riddles.kind, material, sweep, riddles.border, sizes))
  except ValueError as error:
    raise UsageError([f"{riddles.name}: {error}"]) from error


@functools.lru_cache(maxsize=2)
def _text(paths: Sequence[str], tokens: int) -> np.ndarray:
  return held_out_text(paths, tokens)


class _Given(NamedTuple):
  """How a model answered; for several answers the means."""

  accuracy: float  # 1 if every token of the answer is the likeliest one, else 0
  token_accuracy: float  # share of its tokens
  log_likelihood: float  # nats, of the whole answer


def _run(model: EvaluatedModel, request: Request, log: Log, *, riddles: _Riddles) -> Metrics:
  sweep = Sweep(riddles.lengths or _default_lengths(model), DEPTHS, REPEATS, request.seed)
  drawn = _draw(model, riddles, sweep)[: request.limit]
  scored = model.log_likelihoods([Scored(problem.tokens, problem.answer) for problem in drawn])
  cells: dict[tuple[int, float], list[_Given]] = {}
  for problem, likelihood in zip(drawn, scored, strict=True):
    is_top = likelihood.is_top
    given = _Given(float(np.all(is_top)), float(np.mean(is_top)), likelihood.total)
    length, depth = len(problem.tokens), problem.depth
    cells.setdefault((length, depth), []).append(given)
    where = {"length": length, "depth": depth, "needles": list(problem.starts)}
    log({**where, "answer_tokens": len(is_top), **given._asdict()})
  return _table(cells, sweep)


def _table(cells: dict[tuple[int, float], list[_Given]], sweep: Sweep) -> Metrics:
  """Means of all problems, and of those of each length and depth; None where there are none."""
  mean = lambda given: _Given(*np.mean(given, axis=0).tolist())
  whole = mean([given for own in cells.values() for given in own])
  table: dict[str, Any] = {f"mean_{name}": value for name, value in whole._asdict().items()}
  table |= {"lengths": list(sweep.lengths), "depths": list(sweep.depths)}
  means = {cell: mean(own) for cell, own in cells.items()}
  for name in _Given._fields:
    table[name] = [
      [getattr(means.get((n, d)), name, None) for d in sweep.depths] for n in sweep.lengths
    ]
  return table


# name -> what it asks for, and its maker
TASKS = {
  "needle": ("a number in real text, over lengths and depths", make("needle")),
  "needle_keys": ("likewise, one of several", make("needle_keys")),
  "needle_values": ("likewise, several of one name", make("needle_values")),
  "needle_inside": ("key and number meet in one compressed entry", make("needle", "inside")),
  "needle_entry": ("they meet at the border of two entries", make("needle", "entry")),
  "needle_block": ("they meet at the border of two pool blocks", make("needle", "block")),
  "variables": ("a number that is handed on from name to name", make("variables")),
  "copy": ("a passage of real text that begins again", make("copy")),
  "induction": ("drawn tokens that begin again", make("induction")),
}
