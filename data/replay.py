"""Which steps see bounded replay, and where their rows were found again: drawn, never stored.

The report says that post-training simulates replay, not how often nor where. What is drawn here is
our choice: a server of agents finds a conversation up to about the end of its last response, and
other prefixes anywhere.
Legend: S encoder slots, T decoder slots.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.config import DataConfig, ReplayConfig
from data.conversation import Conversation
from data.errors import DataError
from data.source import Row
from deepseek_jax.layout import (
  NO_HIT,
  Document,
  Layout,
  Turns,
  build_layout,
  decoder_slots_of,
)
from deepseek_jax.ngram import NgramHash


@dataclasses.dataclass(frozen=True)
class RowLayouts:
  """Rows -> layouts of two shapes: exact ones, and those of a step with replay.

  Args:
    cfg: of the data.
    ratios: compression ratios to lay entries out for.
    hashing: Engram's; None for none.
    window: of the model; None where every row is exact.
  """

  cfg: DataConfig
  ratios: Sequence[int]
  hashing: NgramHash | None
  window: int | None

  def exact(self, row: Row) -> Layout:
    """S = T = data.slots: every token goes through the decoder, with all windows."""
    documents = [document_of(one) for one in row.documents]
    return self._build(documents, slots=self.cfg.slots)

  def replayed(self, row: Row, place: "Place") -> Layout:
    """S = data.slots and a window for each of max_hits, T = decoder_slots.

    Raises: DataError for a row without turns, and for one whose responses take more than T.
    """
    cfg, window = self.cfg.replay, self.window
    if window is None:
      raise ValueError("window is None, but a row with replay is laid out for one.")
    if any(isinstance(one, Document) for one in row.documents):
      raise DataError(f"{row.record} holds no conversations, which data.replay.share is for.")
    turns = [one.turns for one in row.documents if isinstance(one, Conversation)]
    need = sum(decoder_slots_of(own, window) for own in turns)
    if need > cfg.decoder_slots:
      raise DataError(
        f"{row.record} needs {need} decoder slots, data.replay.decoder_slots is "
        f"{cfg.decoder_slots}; set it to what the rows were packed for."
      )
    return self._build(
      [document_of(one) for one in row.documents],
      turns,
      draw_hits(turns, cfg, window, place, self.cfg.shuffle_seed),
      slots=self.cfg.slots + cfg.max_hits * window,
      replay=cfg.of_rows(window),
    )

  def _build(self, *arguments: Any, **options: Any) -> Layout:
    return build_layout(*arguments, ratios=self.ratios, hashing=self.hashing, **options)


class Place(NamedTuple):
  """What a row's hits are drawn for: the same on every host and after every restart."""

  folder: int  # its number among data.paths
  epoch: int
  record: int  # its number in the folder


def is_replayed(step: int, share: float) -> bool:
  """Whether step `step`, from 0, is one of the `share` of all steps; as evenly as can be."""
  return int((step + 1) * share) > int(step * share)


def document_of(one: Document | Conversation) -> Document:
  """A conversation as it is packed: whole, with the weights of its loss."""
  if isinstance(one, Document):
    return one
  return Document(one.tokens, loss=np.asarray(one.loss_mask, np.float32))


def draw_hits(
  turns: Sequence[Turns], cfg: ReplayConfig, window: int, place: Place, seed: int
) -> list[list[int]]:
  """Hits of the conversations of a row, as `build_layout` takes them: for each turn one or NO_HIT.

  A share cfg.hit_share of the rows has hits, in as many of their turns as can have one, at most
  cfg.max_hits. A hit lies between the response before its turn and its own response: right after
  the former in a share cfg.border_share, else anywhere, each multiple of cfg.hit_multiple alike.
  """
  random = np.random.default_rng((seed, *place))
  hits = [[NO_HIT] * len(own) for own in turns]
  if random.random() >= cfg.hit_share:
    return hits
  possible = []
  for number, own in enumerate(turns):
    after = 0
    for turn, (begin, end) in enumerate(own):
      first = max(after, window + 1)
      first += -first % cfg.hit_multiple
      if first < begin:
        possible.append((number, turn, range(first, begin, cfg.hit_multiple)))
      after = end
  for choice in random.permutation(len(possible))[: cfg.max_hits]:
    number, turn, positions = possible[choice]
    at_border = random.random() < cfg.border_share
    hits[number][turn] = positions[0 if at_border else random.integers(len(positions))]
  return hits


def pack_conversations(
  conversations: Iterable[Conversation], *, slots: int, decoder_slots: int, window: int
) -> Iterator[list[Conversation]]:
  """Rows of whole conversations that fit in both: tokens in `slots`, responses in `decoder_slots`.

  Each goes to the fullest of a few open rows that has room; the fullest row is closed for a new one
  where none has. `data.replay.max_hits` windows of copies have slots of their own, so hits change
  nothing here.

  Raises: ValueError for a conversation that no row can hold.
  """
  open_rows: list[_OpenRow] = []
  for number, one in enumerate(conversations):
    need = np.array([len(one.tokens), decoder_slots_of(one.turns, window)])
    room = np.array([slots, decoder_slots])
    if np.any(need > room):
      raise ValueError(
        f"conversation {number} needs {need[0]} slots and {need[1]} decoder slots, a row has "
        f"{slots} and {decoder_slots}."
      )
    fitting = [row for row in open_rows if np.all(row.used + need <= room)]
    if not fitting:
      if len(open_rows) == _OPEN_ROWS:
        fullest = max(open_rows, key=lambda row: (row.used / room).max())
        open_rows.remove(fullest)
        yield fullest.conversations
      fitting = [_OpenRow([], np.zeros(2, int))]
      open_rows += fitting
    row = max(fitting, key=lambda row: (row.used / room).max())
    row.conversations.append(one)
    row.used += need
  yield from (row.conversations for row in open_rows)


_OPEN_ROWS = 16  # enough that rows are full, few enough that neighbours stay near each other


@dataclasses.dataclass(eq=False)
class _OpenRow:
  conversations: list[Conversation]
  used: np.ndarray  # [2] slots and decoder slots
