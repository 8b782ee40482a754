"""Plain documents: read, encoded between BOS and EOS, packed without a gap."""

import pathlib
from collections.abc import Iterable, Sequence

from data.prepare.corpus import Corpus
from data.prepare.progress import phase
from data.prepare.request import PrepareRequest
from data.prepare.shards import write_split
from data.prepare.sources import SourceText, read_source
from data.prepare.tokenizer import Vocabulary
from data.prepared import Split

ENCODE_AT_ONCE = 64  # documents: enough to keep the library's threads busy between two advances


class TextContents:
  """What `run.prepare` does with text."""

  def __init__(self, request: PrepareRequest):
    self._request = request
    self.dropped: dict[str, int] = {}  # beside what the corpus counts

  def documents(self) -> Iterable[SourceText]:
    return read_source(self._request.source, self._request.text_field)

  def training_texts(self, texts: Sequence[str]) -> Iterable[str]:
    return texts

  def use(self, vocab: Vocabulary, corpus: Corpus) -> None:
    self._vocab, self._corpus = vocab, corpus

  def write(self, folder: pathlib.Path, name: str) -> Split:
    documents, texts = [], self._corpus.split(name)
    with phase(f"encoding the {name} split", len(texts)) as advance:
      for start in range(0, len(texts), ENCODE_AT_ONCE):
        chunk = texts[start : start + ENCODE_AT_ONCE]
        documents += self._vocab.encode(chunk)
        advance(len(chunk))
    size = sum(len(text.encode()) for text in texts)
    slots = self._request.slots
    return write_split(
      folder, name, documents, text_bytes=size, slots=slots, vocab=self._vocab.size
    )

  def about(self) -> dict:
    """What metadata.json says of it."""
    return {"contents": "text"}
