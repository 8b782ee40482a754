"""The token layout: which slot holds what and sees what, as plain arrays. NumPy only.

A row of a batch has S encoder slots and T decoder slots (pretraining: T = S, one to one). Packing,
document masks and, in post-training, replay are all expressed here, so the model has one forward.
Legend: B rows, S encoder slots, T decoder slots, m compression ratio, L Engram tables, R rows read
by a token from one table. JAX arrays may stand in for the NumPy ones: a Layout is a pytree.

Replay. A server keeps the compressed entries of what it has read, but not always the windows. It
rebuilds a window from the last W tokens alone (W the window), which this layout imitates:
- Decoder: for a response that starts at position a, only a - W ... end of the response enter it, as
  a segment that no window leaves. Responses are segments of their own over one encoder pass.
- Encoder: where a prefix of p tokens was found without its windows, p - W ... p - 1 stand in the
  row a second time, right before p, as copies with no loss. A copy sees what its original sees and
  makes no entry, except that a group that straddles p is made of copies below p.
Source: model.md sections 5.1 and 5.2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from deepseek_jax.ngram import NgramHash

TEXT, IMAGE_START, IMAGE, IMAGE_NEWLINE, IMAGE_END = -1, 0, 1, 2, 3  # values of `modality`
PADDING = -1

Array = Any  # np.ndarray on the host, jax.Array inside a compiled step


class Layout(NamedTuple):
  """Where every token of a batch sits. Fields without a comment are int32.

  The id of a compressed entry is (last slot of its group) // m: ids are unique in a row, and
  entries shard exactly like slots. Cells of the entry axis that hold no entry are -1 throughout.
  """

  tokens: Array  # [B,S] token ids, 0 in padding
  positions: Array  # [B,S] position inside the document
  modality: Array  # [B,S] TEXT or the kind of image-span token
  document: Array  # [B,S] index of the document in the row, -1 padding
  is_copy: Array  # [B,S] bool, a replay copy
  segment_start: Array  # [B,S] first slot that the sliding window may reach
  entry_slots: dict[int, Array]  # m -> [B,S/m,m] slots that an entry is made of
  entry_begin: dict[int, Array]  # m -> [B,S] first entry id that the slot may see
  entry_end: dict[int, Array]  # m -> [B,S] one past the last; the range may contain empty cells
  engram_rows: Array  # [B,S,L,R] table rows, -1 padding
  decoder_slots: Array  # [B,T] encoder slot that the decoder slot starts from, -1 padding
  decoder_segment_start: Array  # [B,T] like segment_start, in decoder slots
  decoder_entry_begin: dict[int, Array]  # m -> [B,T]
  decoder_entry_end: dict[int, Array]  # m -> [B,T]
  targets: Array  # [B,T] next token, 0 where the weight is 0
  weights: Array  # [B,T] float32 loss weight


def real_slots(layout: Layout) -> Array:
  """bool [B,S]: the slot holds a token of a document and is no replay copy."""
  return (layout.document >= 0) & ~layout.is_copy


class Document(NamedTuple):
  """A run of tokens that is packed whole.

  next_token follows the last of them (it is that token's target, of weight 1); -1 if nothing does.
  """

  tokens: np.ndarray  # [n] int32
  next_token: int = -1
  modality: np.ndarray | None = None  # [n] int32; None: all text
  loss: np.ndarray | None = None  # [n] float32 weight of each token as a target; None: all 1


Turns = Sequence[tuple[int, int]]  # first and one past the last position of each response
NO_HIT = 0  # in the place of a hit: the turn starts with all that the turn before left


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
  """What a row with turns has to know of the server that it imitates."""

  window: int  # W, slots of the model's sliding window
  decoder_slots: int  # T
  hit_multiple: int = 1  # hits are multiples of it: tokens of a block of the candidate pool
  # Where decoder slots below a hit start if the new input is shorter than the window: from the
  # copies ("window"), or from the originals, as if their encoder outputs had been kept ("exact").
  short_input: Literal["window", "exact"] = "window"


def decoder_slots_of(turns: Turns, window: int) -> int:
  """Decoder slots that the responses of a document take: each with up to `window` before it."""
  return sum(end - start + min(window, start) for start, end in turns)


def build_layout(
  documents: Sequence[Document],
  turns: Sequence[Turns] | None = None,
  cuts: Sequence[Sequence[int]] | None = None,
  *,
  slots: int,
  ratios: Sequence[int],
  hashing: NgramHash | None = None,
  align: int = 1,
  replay: Replay | None = None,
) -> Layout:
  """Packs documents into one row of `slots` slots, one after the other.

  Args:
    documents: packed in order; together they must fit.
    turns: of each document; None lays out no turns, and T = S.
    cuts: of each document, for each turn the prefix that was found without its windows, in tokens:
      from the end of the response before it to the turn's own response, longer than the window; or
      NO_HIT. None: no hits.
    slots: S. Must be a multiple of every ratio.
    ratios: the compression ratios m for which entries are laid out.
    hashing: Engram hash; None gives rows of width 0.
    align: documents start at multiples of this many slots.
    replay: with turns alone.

  Returns: a Layout with B = 1.
  Raises: ValueError for an empty document, one that does not fit, a bad slot count, and for turns
    and hits that no server could have met.
  """
  if bad := [m for m in ratios if slots % m]:
    raise ValueError(f"slots is {slots}, which is not a multiple of the ratios {bad}.")
  if (turns is None) != (replay is None) or (turns is None and cuts is not None):
    raise ValueError("turns and replay belong together, and cuts to both; give all or none.")
  hits = cuts or [[NO_HIT] * len(own) for own in turns or [()] * len(documents)]
  if turns is not None and replay is not None:
    _check_turns(documents, turns, hits, ratios, replay)
  row = _empty_row(slots, ratios, hashing)
  start, segments = 0, []
  for number, document in enumerate(documents):
    if len(document.tokens) == 0:
      raise ValueError(f"document {number} is empty.")
    order = _order(len(document.tokens), [hit for hit in hits[number] if hit], replay)
    end = start + len(order.position)
    if end > slots:
      raise ValueError(f"document {number} needs slots {start} to {end - 1}, the row has {slots}.")
    _place(row, number, document, start, order, hashing)
    if turns is not None and replay is not None:
      segments += _segments(document, start, order, turns[number], hits[number], replay)
    start += -(-(end - start) // align) * align
  row = _one_to_one(row) if replay is None else _with_decoder(row, segments, replay.decoder_slots)
  return stack_layouts([row], axis_exists=False)


def stack_layouts(rows: Sequence[Layout], *, axis_exists: bool = True) -> Layout:
  """Joins rows of equal shape along the batch axis."""
  join = np.concatenate if axis_exists else np.stack

  def field(values):
    if isinstance(values[0], dict):
      return {m: join([v[m] for v in values]) for m in values[0]}
    return join(values)

  return Layout._make(field(values) for values in zip(*rows, strict=True))


def _empty_row(slots: int, ratios: Sequence[int], hashing: NgramHash | None) -> Layout:
  """A row of padding: sees nothing, weighs nothing."""
  whole = lambda value: np.full(slots, value, np.int32)
  nothing = np.arange(1, slots + 1, dtype=np.int32)  # a window that starts after its own slot
  tables, rows = (len(hashing.cfg.layers), hashing.cfg.lookups) if hashing else (0, 0)
  return Layout(
    tokens=whole(0),
    positions=whole(0),
    modality=whole(TEXT),
    document=whole(PADDING),
    is_copy=np.zeros(slots, bool),
    segment_start=nothing.copy(),
    entry_slots={m: np.full((slots // m, m), PADDING, np.int32) for m in ratios},
    entry_begin={m: whole(0) for m in ratios},
    entry_end={m: whole(0) for m in ratios},
    engram_rows=np.full((slots, tables, rows), PADDING, np.int32),
    decoder_slots=whole(PADDING),
    decoder_segment_start=nothing.copy(),
    decoder_entry_begin={},
    decoder_entry_end={},
    targets=whole(0),
    weights=np.zeros(slots, np.float32),
  )


class _Order(NamedTuple):
  """In which order a document stands in its slots, counted from its first slot and position."""

  position: np.ndarray  # [slots of the document] position of the token in each slot
  is_copy: np.ndarray  # [slots of the document] bool
  segment: np.ndarray  # [slots of the document] first slot that its window may reach
  slot: np.ndarray  # [n] slot of each position that is no copy


def _order(tokens: int, hits: Sequence[int], replay: Replay | None) -> _Order:
  """Each hit, ascending, puts a window of copies before its position."""
  window = 0 if replay is None else replay.window
  slot = np.arange(tokens) + window * np.searchsorted(hits, np.arange(tokens), side="right")
  size = tokens + window * len(hits)
  position, is_copy, segment = np.zeros(size, np.int32), np.ones(size, bool), np.zeros(size, int)
  position[slot], is_copy[slot] = np.arange(tokens), False
  for hit in hits:
    first = slot[hit] - window
    position[first : slot[hit]] = np.arange(hit - window, hit)
    segment[first:] = first
  return _Order(position, is_copy, segment, slot)


def _place(
  row: Layout, number: int, document: Document, start: int, order: _Order, hashing: NgramHash | None
) -> None:
  """Writes one document into the row's arrays, from slot `start` on."""
  tokens = np.asarray(document.tokens, np.int32)
  span = slice(start, start + len(order.position))
  row.tokens[span] = tokens[order.position]
  row.positions[span] = order.position
  row.document[span] = number
  row.is_copy[span] = order.is_copy
  row.segment_start[span] = start + order.segment
  modality = np.full(len(tokens), TEXT) if document.modality is None else document.modality
  row.modality[span] = modality[order.position]
  if hashing is not None:
    row.engram_rows[span] = hashing.rows(tokens, modality != TEXT)[order.position]
  for m, entry_slots in row.entry_slots.items():
    last = start + order.slot[m - 1 :: m]  # of each complete group; the others stand before it
    first = (start + m - 1) // m  # id of the document's first entry: (start + m - 1) is its last
    entry_slots[last // m] = last[:, None] + np.arange(1 - m, 1)
    row.entry_begin[m][span] = first
    row.entry_end[m][span] = np.append(first, last // m + 1)[(order.position + 1) // m]
  following, weights = _targets(document)
  row.targets[span] = np.maximum(following, 0)[order.position]
  row.weights[span] = np.where(order.is_copy, 0, weights[order.position])


def _targets(document: Document) -> tuple[np.ndarray, np.ndarray]:
  """[n] the token after each one, -1 none, and its weight."""
  following = np.append(document.tokens[1:], document.next_token).astype(np.int32)
  weights = (following >= 0).astype(np.float32)
  if document.loss is not None:
    weights[:-1] *= document.loss[1:]
  return following, weights


def _one_to_one(row: Layout) -> Layout:
  """The row with a decoder slot for every encoder slot."""
  slot = np.arange(len(row.document))
  return row._replace(
    decoder_slots=np.where(row.document >= 0, slot, PADDING).astype(np.int32),
    decoder_segment_start=row.segment_start.copy(),
    decoder_entry_begin={m: v.copy() for m, v in row.entry_begin.items()},
    decoder_entry_end={m: v.copy() for m, v in row.entry_end.items()},
  )


class _Segment(NamedTuple):
  """One response with what comes before it, as decoder slots."""

  slots: np.ndarray  # encoder slots that they start from
  learned: np.ndarray  # bool: its target is a token of the response


def _segments(
  document: Document, start: int, order: _Order, turns: Turns, hits: Sequence[int], replay: Replay
) -> list[_Segment]:
  found = []
  for (begin, end), hit in zip(turns, hits, strict=True):
    position = np.arange(max(0, begin - replay.window), end)
    slot = order.slot[position]
    if hit and replay.short_input == "window":
      slot = np.where(position < hit, order.slot[hit] - (hit - position), slot)
    found.append(_Segment(start + slot, (position >= begin - 1) & (position < end - 1)))
  return found


def _with_decoder(row: Layout, segments: Sequence[_Segment], decoder_slots: int) -> Layout:
  """The row with these decoder slots in place of one for every encoder slot."""
  used = sum(len(segment.slots) for segment in segments)
  if used > decoder_slots:
    raise ValueError(f"the responses take {used} decoder slots, the row has {decoder_slots}.")
  slots = np.full(decoder_slots, PADDING, np.int32)
  segment_start = np.arange(1, decoder_slots + 1, dtype=np.int32)
  targets, weights = np.zeros(decoder_slots, np.int32), np.zeros(decoder_slots, np.float32)
  begin = 0
  for segment in segments:
    span = slice(begin, begin + len(segment.slots))
    slots[span], segment_start[span] = segment.slots, begin
    targets[span] = row.targets[segment.slots]
    weights[span] = np.where(segment.learned, row.weights[segment.slots], 0)
    begin = span.stop
  at = lambda x_S: np.where(slots >= 0, x_S[np.maximum(slots, 0)], 0).astype(np.int32)
  return row._replace(
    decoder_slots=slots,
    decoder_segment_start=segment_start,
    decoder_entry_begin={m: at(x_S) for m, x_S in row.entry_begin.items()},
    decoder_entry_end={m: at(x_S) for m, x_S in row.entry_end.items()},
    targets=targets,
    weights=weights,
  )


def _check_turns(
  documents: Sequence[Document],
  turns: Sequence[Turns],
  cuts: Sequence[Sequence[int]],
  ratios: Sequence[int],
  replay: Replay,
) -> None:
  """Raises ValueError with a sentence for every turn and hit that no server could have met."""
  if not len(documents) == len(turns) == len(cuts):
    raise ValueError(
      f"{len(documents)} documents need as many lists of turns and of cuts, got {len(turns)} and "
      f"{len(cuts)}."
    )
  found = []
  if replay.window % replay.hit_multiple or replay.window < max(ratios, default=1):
    found.append(
      f"replay.window is {replay.window}; it must be a multiple of hit_multiple "
      f"({replay.hit_multiple}) and at least the largest of the ratios {tuple(ratios)}."
    )
  for number, (document, own, hits) in enumerate(zip(documents, turns, cuts, strict=True)):
    if len(hits) != len(own):
      found.append(f"document {number} has {len(own)} turns, but {len(hits)} hits.")
      continue
    after = 0
    for turn, ((begin, end), hit) in enumerate(zip(own, hits, strict=True)):
      name = f"document {number}, turn {turn}"
      if not max(after, 1) <= begin < end <= len(document.tokens):
        found.append(
          f"{name}: the response spans tokens {begin} to {end - 1}; accepted are spans from "
          f"{max(after, 1)} to {len(document.tokens) - 1}."
        )
      if hit != NO_HIT and (problem := _hit_problem(hit, after, begin, replay)):
        found.append(f"{name}: a hit of {hit} tokens {problem}.")
      after = end
  if found:
    raise ValueError("\n".join(found))


def _hit_problem(hit: int, after: int, begin: int, replay: Replay) -> str | None:
  if hit <= replay.window:
    return f"is no longer than the window ({replay.window}), so nothing is replayed"
  if hit < after:
    return (
      f"ends inside what the turn before has added (up to {after}); give the turn a row of its own"
    )
  if hit >= begin:
    return f"leaves nothing to read before the response at {begin}"
  if hit % replay.hit_multiple:
    return f"is not a multiple of {replay.hit_multiple}, as the candidate pool needs"
  return None
