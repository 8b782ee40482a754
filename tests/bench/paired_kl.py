"""What fine-tuning with replay changes: KL(exact || replayed) of held-out responses, in pairs.

  python -m tests.bench paired_kl --aware RUN[,RUN] --plain RUN[,RUN] [--json F]

RUN is a run folder of `sft` or one of its steps. The n-th of --aware and the n-th of --plain are a
pair, one for each seed: both began from the same checkpoint and took as many steps on the same rows
in the same order; only data.replay.share is another one. Every response of the validation split is
predicted twice by each, by the exact forward and by the one that a server with bounded replay makes
(train/replay_report.py). The KL of a response is the mean over its learned tokens.

Prints for each pair the mean over responses of KL(aware) - KL(plain), with a 95% interval from
10,000 resamples of whole conversations, since responses of one conversation share their context.
An interval below 0 says that training with replay brings the two forwards nearer.
Legend: R responses, C conversations, B rows, T decoder slots, X resamples.
"""

import datetime
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from deepseek_jax.checkpoint import CheckpointError, restore_step
from deepseek_jax.layout import Layout
from deepseek_jax.optim.low_rank import without_factors
from train import origin
from train import settings as command_line
from train.arguments import lay_mesh
from train.batches import open_held_out, placer, row_group
from train.errors import UsageError, refuse
from train.programs import build_programs
from train.replay_report import EDGES, paired_agreement
from train.served import match_slots
from train.stored_step import StoredStep, find_step

ARGUMENTS = ("--aware", "--plain", "--json")
RESAMPLES, SHARE = 10_000, 0.95
# What the runs of a pair, and those of different pairs, may differ in.
IN_PAIR = ("data.replay.share",)
IN_ALL = (*IN_PAIR, "seed", "data.shuffle_seed")


class Pair(NamedTuple):
  aware: StoredStep
  plain: StoredStep


class Responses(NamedTuple):
  """One checkpoint on all held-out responses, in the order of the rows."""

  conversation_R: np.ndarray  # int, from 0
  kl_R: np.ndarray  # float64 nats a token, mean over the response, as are the next two
  exact_R: np.ndarray
  replayed_R: np.ndarray


class Difference(NamedTuple):
  mean: float
  low: float
  high: float


def main(words: list[str]) -> int:
  try:
    pairs, path = parse(words)
    settings = pairs[0].aware.settings
    compare = jax.jit(paired_agreement(settings))  # once: the models of all pairs are the same
    with jax.set_mesh(mesh := lay_mesh(settings.mesh)):
      records = [measured(pair, mesh, compare) for pair in pairs]
  except (UsageError, CheckpointError) as error:
    return refuse(error.problems if isinstance(error, UsageError) else [str(error)])
  document = {
    "benchmark": "paired_kl",
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "jax": jax.__version__,
    "interval": f"{SHARE:.0%} of {RESAMPLES:,} resamples of conversations",
    "pairs": records,
  }
  if path:
    path.write_text(json.dumps(document, indent=1) + "\n")
  Console(width=max(Console().width, 150)).print(table(records))
  return 0


def parse(words: list[str]) -> tuple[list[Pair], pathlib.Path | None]:
  """The pairs, and where the numbers go. Raises UsageError with every problem."""
  found = command_line.split(words, ARGUMENTS, switches=())
  problems = [*found.problems, *(f"--config.{key} is not an argument." for key in found.overrides)]
  problems += [f"{name} is missing." for name in ARGUMENTS[:2] if name not in found.values]
  if problems:
    raise UsageError(problems)
  aware, plain = (
    [find_step(name, text) for text in found.values[name].split(",")] for name in ARGUMENTS[:2]
  )
  if len(aware) != len(plain):
    raise UsageError([f"--aware names {len(aware)} runs and --plain {len(plain)}."])
  pairs = [Pair(*both) for both in zip(aware, plain, strict=True)]
  if problems := [problem for pair in pairs for problem in pair_problems(pair, pairs[0])]:
    raise UsageError(problems)
  path = found.values.get("--json")
  return pairs, None if path is None else pathlib.Path(path)


def pair_problems(pair: Pair, first: Pair) -> Iterator[str]:
  """Why two runs are no pair, or another kind of pair than the first one."""
  aware, plain = pair
  both = f"{aware.path} and {plain.path}"
  shares = [stored.settings.data.replay.share for stored in pair]
  if not shares[0] > shares[1] == 0:
    yield f"{both} have data.replay.share {shares}; it must be more than 0 and 0."
  if aware.path.name != plain.path.name:
    yield f"{both} are not equally many steps."
  starts = [origin.checkpoint_of(stored) for stored in pair]
  if starts[0] is None or starts[0] != starts[1]:
    yield f"{both} began from {starts[0]} and {starts[1]}; it must be the same checkpoint."
  for other, ignoring in ((plain.settings, IN_PAIR), (first.aware.settings, IN_ALL)):
    changes = command_line.differences(aware.settings, other, ignoring=ignoring)
    yield from (f"{both}, or they and the first pair: {change}" for change in changes)


def measured(pair: Pair, mesh: Mesh, compare: Callable) -> dict[str, Any]:
  """The record of a pair; call it under `jax.set_mesh`."""
  aware, plain = (_responses(stored, mesh, compare) for stored in pair)
  difference = paired_difference(aware, plain)
  means = lambda of: {
    "kl": float(of.kl_R.mean()),
    "exact_loss": float(of.exact_R.mean()),
    "replayed_loss": float(of.replayed_R.mean()),
  }
  return {
    "seed": pair.aware.settings.seed,
    "steps": int(pair.aware.path.name),
    "responses": len(aware.kl_R),
    "conversations": len(np.unique(aware.conversation_R)),
    "aware": {"run": str(pair.aware.path), **means(aware)},
    "plain": {"run": str(pair.plain.path), **means(plain)},
    "difference": difference._asdict(),
  }


def _responses(stored: StoredStep, mesh: Mesh, compare: Callable) -> Responses:
  settings = stored.settings
  abstract = build_programs(settings, mesh).abstract_state
  items = {"params": without_factors(abstract.params), "router": abstract.balance}
  found = restore_step(stored.path, items, verify=False).items
  group = row_group(settings, mesh)
  place = placer(mesh, group)
  rows = (open_held_out(settings, group, replayed=replayed) for replayed in (False, True))
  batches = []
  for exact, replayed in zip(*rows, strict=True):
    layouts = exact.layout, replayed.layout
    agreement = compare(
      found["params"], found["router"], *map(place, layouts), place(match_slots(*layouts, EDGES))
    )
    batches.append(by_response(replayed.layout, *map(np.asarray, agreement[:3])))
  before = np.cumsum([0, *(batch.conversation_R.max(initial=-1) + 1 for batch in batches[:-1])])
  numbered = [
    batch._replace(conversation_R=batch.conversation_R + first)
    for batch, first in zip(batches, before, strict=True)
  ]
  return Responses(*map(np.concatenate, zip(*numbered, strict=True)))


def by_response(layout: Layout, exact_BT, replayed_BT, kl_BT) -> Responses:
  """Means over the learned tokens of every response of a layout with replay; NumPy."""
  row, slot = np.nonzero(layout.weights)
  document = layout.document[row, layout.decoder_slots[row, slot]]
  segment = layout.decoder_segment_start[row, slot]
  _, first, of = np.unique([row, segment], axis=1, return_index=True, return_inverse=True)
  mean = lambda x_BT: np.bincount(of, np.float64(x_BT[row, slot])) / np.bincount(of)
  _, conversation = np.unique([row[first], document[first]], axis=1, return_inverse=True)
  return Responses(conversation, mean(kl_BT), mean(exact_BT), mean(replayed_BT))


def paired_difference(aware: Responses, plain: Responses) -> Difference:
  """Mean of KL(aware) - KL(plain) over responses, with its interval."""
  if not np.array_equal(aware.conversation_R, plain.conversation_R):
    raise ValueError("the two have other responses")
  of_C = aware.conversation_R
  sum_C, count_C = np.bincount(of_C, aware.kl_R - plain.kl_R), np.bincount(of_C)
  drawn_XC = np.random.default_rng(0).integers(len(sum_C), size=(RESAMPLES, len(sum_C)))
  mean_X = sum_C[drawn_XC].sum(axis=1) / count_C[drawn_XC].sum(axis=1)
  low, high = np.quantile(mean_X, [(1 - SHARE) / 2, (1 + SHARE) / 2])
  return Difference(float(sum_C.sum() / count_C.sum()), float(low), float(high))


def table(records: Sequence[dict[str, Any]]) -> Table:
  """One line for each pair; losses in nats a token, means over responses."""
  shown = Table(
    title="KL(exact || replayed) of held-out responses, nats a token", title_justify="left"
  )
  headings = "seed", "responses", "KL plain", "KL aware", "aware - plain", "95% interval"
  for heading in (*headings, "exact loss plain, aware", "replayed loss plain, aware"):
    shown.add_column(heading, justify="right")
  for record in records:
    aware, plain, difference = (record[name] for name in ("aware", "plain", "difference"))
    both = lambda name, aware=aware, plain=plain: f"{plain[name]:.4f}, {aware[name]:.4f}"
    shown.add_row(
      str(record["seed"]),
      f"{record['responses']:,}",
      f"{plain['kl']:.6f}",
      f"{aware['kl']:.6f}",
      f"{difference['mean']:+.6f}",
      f"{difference['low']:+.6f} to {difference['high']:+.6f}",
      both("exact_loss"),
      both("replayed_loss"),
    )
  return shown
