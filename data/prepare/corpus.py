"""Which documents are used, in which order and in which split: all of it decided by hashes.

A document's place in the order and its split come from two independent hashes of its key, so that
adding or removing a document moves no other one.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable

from data.prepare.sources import SourceText

NAMES = "surrogateescape"  # file names need not be UTF-8


@dataclasses.dataclass(frozen=True)
class Corpus:
  train: list[str]  # texts, shuffled
  validation: list[str]
  dropped: dict[str, int]  # reason -> documents
  source_sha256: str  # of keys and texts that are used

  def split(self, name: str) -> list[str]:
    return {"train": self.train, "validation": self.validation}[name]


def select(
  texts: Iterable[SourceText], *, validation_share: float, max_bytes: int | None = None
) -> Corpus:
  """Drops what is no text, empty or an exact duplicate, then orders, limits and splits the rest.

  Args:
    texts: documents with distinct keys.
    validation_share: expected share of the documents in the validation split.
    max_bytes: documents are taken, in shuffled order, while their UTF-8 bytes fit; None takes all.
  """
  dropped = Counter({"not text": 0, "empty": 0, "duplicate": 0, "over the limit": 0})
  seen, whole = set(), hashlib.sha256()
  splits: dict[bool, list[str]] = {False: [], True: []}
  used = 0
  for key, text in sorted(texts, key=lambda document: _uniform(document.key, "order")):
    encoded = _encode(text)
    digest = hashlib.sha256(encoded or b"").digest()
    if encoded is None:
      dropped["not text"] += 1
    elif not encoded:
      dropped["empty"] += 1
    elif digest in seen:
      dropped["duplicate"] += 1
    elif max_bytes is not None and used + len(encoded) > max_bytes:
      dropped["over the limit"] += 1
    else:
      seen.add(digest)
      used += len(encoded)
      whole.update(hashlib.sha256(key.encode(errors=NAMES)).digest() + digest)
      splits[_uniform(key, "split") < validation_share].append(text or "")
  return Corpus(splits[False], splits[True], dict(dropped), whole.hexdigest())


def _uniform(key: str, purpose: str) -> float:
  """A number in [0, 1) that depends on the key and on what it is for."""
  digest = hashlib.sha256(f"{purpose}\0{key}".encode(errors=NAMES)).digest()
  return int.from_bytes(digest[:6]) / 2**48  # 48 bits are exact in a float


def _encode(text: str | None) -> bytes | None:
  try:
    return None if text is None else text.encode("utf-8")
  except UnicodeEncodeError:  # a lone surrogate, which JSON can carry
    return None
