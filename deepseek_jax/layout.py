"""The token layout: which slot holds what and sees what, as plain arrays. NumPy only.

A row of a batch has S encoder slots and T decoder slots (pretraining: T = S, one to one). Packing,
document masks and, in post-training, replay are all expressed here, so the model has one forward.
Legend: B rows, S encoder slots, T decoder slots, m compression ratio, L Engram tables, R rows read
by a token from one table. JAX arrays may stand in for the NumPy ones: a Layout is a pytree.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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

  next_token follows the last of them (it is that token's target); -1 if nothing does.
  """

  tokens: np.ndarray  # [n] int32
  next_token: int = -1
  modality: np.ndarray | None = None  # [n] int32; None: all text


def build_layout(
  documents: Sequence[Document],
  *,
  slots: int,
  ratios: Sequence[int],
  hashing: NgramHash | None = None,
  align: int = 1,
) -> Layout:
  """Packs documents into one row of `slots` slots, one after the other.

  Args:
    documents: packed in order; together they must fit.
    slots: S. Must be a multiple of every ratio.
    ratios: the compression ratios m for which entries are laid out.
    hashing: Engram hash; None gives rows of width 0.
    align: documents start at multiples of this many slots.

  Returns: a Layout with B = 1 and T = S.
  Raises: ValueError for an empty document, one that does not fit, or a bad slot count.
  """
  if bad := [m for m in ratios if slots % m]:
    raise ValueError(f"slots is {slots}, which is not a multiple of the ratios {bad}.")
  row = _empty_row(slots, ratios, hashing)
  start = 0
  for number, document in enumerate(documents):
    length = len(document.tokens)
    if length == 0:
      raise ValueError(f"document {number} is empty.")
    if start + length > slots:
      raise ValueError(
        f"document {number} needs slots {start} to {start + length - 1}, the row has {slots}."
      )
    _place(row, number, document, start, ratios, hashing)
    start += -(-length // align) * align
  row = row._replace(
    decoder_slots=np.where(row.document >= 0, np.arange(slots), PADDING).astype(np.int32),
    decoder_segment_start=row.segment_start.copy(),
    decoder_entry_begin={m: v.copy() for m, v in row.entry_begin.items()},
    decoder_entry_end={m: v.copy() for m, v in row.entry_end.items()},
  )
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


def _place(
  row: Layout,
  number: int,
  document: Document,
  start: int,
  ratios: Sequence[int],
  hashing: NgramHash | None,
) -> None:
  """Writes one document into the row's arrays, from slot `start` on."""
  tokens = np.asarray(document.tokens, np.int32)
  length = len(tokens)
  span = slice(start, start + length)
  row.tokens[span] = tokens
  row.positions[span] = np.arange(length)
  row.document[span] = number
  row.segment_start[span] = start
  if document.modality is not None:
    row.modality[span] = document.modality
  if hashing is not None:
    row.engram_rows[span] = hashing.rows(tokens, row.modality[span] != TEXT)
  for m in ratios:
    groups = length // m
    first = (
      start + m - 1
    ) // m  # id of the document's first entry: (start + m - 1) is its last slot
    group_slots = start + np.arange(groups * m, dtype=np.int32).reshape(groups, m)
    row.entry_slots[m][first : first + groups] = group_slots
    row.entry_begin[m][span] = first
    row.entry_end[m][span] = first + (np.arange(length) + 1) // m
  following = np.append(tokens[1:], document.next_token)
  row.targets[span] = np.maximum(following, 0)
  row.weights[span] = following >= 0
