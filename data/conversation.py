"""A conversation as token ids: which of them are learned, and where its responses lie.

Legend: n tokens.
"""

from typing import NamedTuple

import numpy as np


class Conversation(NamedTuple):
  """One chat or tool trace, encoded.

  Everything outside of the responses is context: system and user messages, tool results, and the
  opening of each answer up to the first token that the model itself gives.
  """

  tokens: np.ndarray  # [n] int32
  loss_mask: np.ndarray  # [n] bool: the token is a target; only tokens of responses may be
  turns: tuple[tuple[int, int], ...]  # (first, one past the last) position of each response

  def problems(self) -> list[str]:
    """Every reason for which this is no conversation, in plain sentences."""
    length, found, after = len(self.tokens), [], 0
    if len(self.loss_mask) != length:
      return [f"loss_mask has {len(self.loss_mask)} values for {length} tokens."]
    outside = np.array(self.loss_mask, bool)
    for number, (start, end) in enumerate(self.turns):
      if not max(after, 1) <= start < end <= length:
        found.append(
          f"response {number} spans tokens {start} to {end - 1}; it must hold a token, come after "
          f"token {max(after, 1) - 1} and end before token {length}."
        )
        continue
      outside[start:end] = False
      after = end
    if outside.any() and not found:
      found.append(f"token {int(np.argmax(outside))} is learned but lies in no response.")
    return found
