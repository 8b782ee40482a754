"""The text that questions hide in: held-out tokens of prepared folders, one after the other.

Legend: N tokens.
"""

from collections.abc import Sequence

import numpy as np

from data.prepared import load_prepared
from data.source import RowSource


def held_out_text(paths: Sequence[str], tokens: int) -> np.ndarray:
  """int32 [N] tokens of the validation splits in fixed order, at most `tokens` of them.

  Marks that frame documents (BOS, EOS, padding) are left out; a damaged record counts as empty.

  Raises: as load_prepared and RowSource do.
  """
  pieces, found = [np.zeros(0, np.int32)], 0
  for path in paths:
    prepared = load_prepared(path)
    if not prepared.validation.rows:
      continue
    rows = RowSource(prepared, "validation", replace=False, max_damaged=0)
    frame = (prepared.bos, prepared.eos, prepared.pad)
    for number in range(len(rows)):
      if found >= tokens:
        break
      for document in rows[number].documents:
        kept = document.tokens[~np.isin(document.tokens, frame)]
        pieces.append(kept.astype(np.int32))
        found += len(kept)
  return np.concatenate(pieces)[:tokens]
