"""Held-out rows as a server would lay them out: with early exit, or behind a prefix that it found.

NumPy only. Legend: B rows, S encoder slots, T decoder slots, W window.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from data.config import ReplayConfig
from data.conversation import Conversation
from data.prepared import Prepared
from data.replay import Place, document_of, draw_hits
from data.source import Row, RowSource
from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import (
  NO_HIT,
  Document,
  Layout,
  Replay,
  Turns,
  build_layout,
  decoder_slots_of,
  stack_layouts,
)
from deepseek_jax.ngram import NgramHash


class Plan(NamedTuple):
  """A row with the responses that are looked at."""

  documents: list[Document]
  turns: list[Turns]  # of each document; may be empty
  cuts: list[list[int]]  # the prefix that each response was found behind, or NO_HIT


class Pair(NamedTuple):
  """The same rows twice."""

  exact: Layout  # T = S
  served: Layout


def held_out_rows(data: Sequence[Prepared], limit: int | None) -> Iterator[Row]:
  """The first `limit` rows of each validation split, in fixed order; a damaged one is empty."""
  for prepared in data:
    if prepared.validation.rows:
      source = RowSource(prepared, "validation", replace=False, max_damaged=0)
      for number in range(len(source))[:limit]:
        yield source[number]


def early_exit(row: Row) -> Plan:
  """Every response of a row; of text, the second half of each document counts as one."""
  turns = [_responses(one) for one in row.documents]
  return Plan(_documents(row), turns, [[NO_HIT] * len(own) for own in turns])


def continued(row: Row, replay: ReplayConfig, window: int, seed: int) -> Plan:
  """The responses behind a prefix without windows, as `draw_hits` draws them; others are context.

  A prefix of text ends anywhere before the response. `replay.max_hits` and `hit_multiple` hold.
  """
  text = any(isinstance(one, Document) for one in row.documents)
  replay = dataclasses.replace(
    replay, hit_share=1.0, border_share=0.0 if text else replay.border_share
  )
  whole = early_exit(row)
  hits = draw_hits(whole.turns, replay, window, Place(0, 0, row.number), seed)
  chosen = [[n for n, hit in enumerate(own) if hit != NO_HIT] for own in hits]
  pick = lambda values: [[own[n] for n in ns] for own, ns in zip(values, chosen, strict=True)]
  return whole._replace(turns=pick(whole.turns), cuts=pick(hits))


def _responses(one: Document | Conversation) -> Turns:
  if isinstance(one, Conversation):
    return one.turns
  length = len(one.tokens)
  return ((length // 2, length),) if length > 1 else ()


def _documents(row: Row) -> list[Document]:
  """Without the token after a document that was cut: it belongs to no response."""
  return [document_of(one)._replace(next_token=-1) for one in row.documents]


class RowShape(NamedTuple):
  """What all layouts of a comparison have in common."""

  cfg: ModelConfig
  hashing: NgramHash | None
  slots: int  # S of the exact rows, a multiple of `unit`
  unit: int  # what S and T are multiples of

  def pairs(self, plans: Sequence[Plan], replay: ReplayConfig, rows: int) -> Iterator[Pair]:
    """Layouts of `rows` rows at a time, the last ones filled up with empty rows."""
    window, most = self.cfg.attention.window, max((_hits(plan) for plan in plans), default=0)
    used = (sum(decoder_slots_of(own, window) for own in plan.turns) for plan in plans)
    server = Replay(
      window=window,
      # A device holds at least a window less one of them.
      decoder_slots=self._rounded(max(self.unit * window, *used)),
      hit_multiple=replay.hit_multiple if most else 1,
      short_input=replay.short_input,
    )
    slots = self._rounded(self.slots + most * window)
    for some in batches(plans, rows, Plan([], [], [])):
      yield Pair(
        self.exact([plan.documents for plan in some]),
        stack_layouts([self._build(*plan, slots=slots, replay=server) for plan in some]),
      )

  def exact(self, rows: Sequence[Sequence[Document]]) -> Layout:
    """Every token goes through the decoder, with all windows."""
    return stack_layouts([self._build(documents, slots=self.slots) for documents in rows])

  def _rounded(self, slots: int) -> int:
    return -(-slots // self.unit) * self.unit

  def _build(self, *arguments, **options) -> Layout:
    return build_layout(*arguments, ratios=self.cfg.ratios, hashing=self.hashing, **options)


def batches[T](items: Iterable[T], count: int, filler: T) -> Iterator[list[T]]:
  """Lists of `count` items; `filler` stands for those that the last list lacks."""
  for some in itertools.batched(items, count):
    yield [*some, *[filler] * (count - len(some))]


def hit_multiple(cfg: ModelConfig) -> int:
  """What the lengths of prefixes are multiples of: the tokens of a block of the pool, if any."""
  source = cfg.indexer.pool_source
  return 1 if source is None else cfg.indexer.pool_block_size * cfg.compress_ratios[source]


def unit(cfg: ModelConfig, context: int) -> int:
  """Of slots: what entries and the devices along a row divide them by."""
  return math.lcm(*cfg.ratios, 1) * context


def _hits(plan: Plan) -> int:
  return sum(hit != NO_HIT for own in plan.cuts for hit in own)
