"""Documents one after the other, cut where a row is full: no slot is lost but in the last row."""

from collections.abc import Iterable, Iterator

import numpy as np

from deepseek_jax.layout import Document


def pack(documents: Iterable[np.ndarray], slots: int) -> Iterator[list[Document]]:
  """Rows of `slots` tokens; the last one may be shorter.

  A cut document goes on in the next row as a piece with positions of its own; the token after the
  cut is the target of the last one before it, so every token but a document's first is a target.
  """
  row, used = [], 0
  for tokens in documents:
    start = 0
    while start < len(tokens):
      end = min(len(tokens), start + slots - used)
      following = int(tokens[end]) if end < len(tokens) else -1
      row.append(Document(tokens[start:end], following))
      used += end - start
      start = end
      if used == slots:
        yield row
        row, used = [], 0
  if row:
    yield row
