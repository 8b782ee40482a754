"""Chats: read, encoded, cut where they are too long for a row, packed whole."""

import pathlib
from collections.abc import Iterable, Sequence

from data.chat.render import render
from data.chat.split import Piece, Room, TooLong, split
from data.chat.tokens import chat_tokenizer, encode_turns
from data.chat.views import views
from data.errors import RequestError
from data.prepare.corpus import Corpus
from data.prepare.progress import phase
from data.prepare.request import PrepareRequest
from data.prepare.shards import write_records
from data.prepare.sources import SourceText
from data.prepare.tokenizer import Vocabulary
from data.prepare.traces import Trace, identity, read_traces, texts_of
from data.prepared import Split
from data.replay import pack_conversations
from data.rows import encode_conversations, token_dtype

UNLIMITED = 2**62  # decoder slots
NOTHING_LEARNED, TOO_LONG = "without a learned answer", "answers too long for a row"


class ChatContents:
  """What `run.prepare` does with chats. A chat and all that is cut from it is in one split."""

  def __init__(self, request: PrepareRequest):
    self._source = request.source
    self._room = Room(request.slots, request.decoder_slots or UNLIMITED, request.window)
    self._decoder_slots = 0  # that a row takes at most
    self._traces: dict[str, Trace] = {}  # by what identifies a chat
    self._pieces: dict[str, list[Piece]] = {}  # of each split
    self.dropped = {NOTHING_LEARNED: 0, TOO_LONG: 0}  # beside what the corpus counts
    self._names: list[str] = []  # of the same, each with where it comes from

  def documents(self) -> Iterable[SourceText]:
    for trace in read_traces(self._source):
      text = identity(trace.chat)
      self._traces.setdefault(text, trace)
      yield SourceText(trace.key, text)

  def training_texts(self, texts: Sequence[str]) -> Iterable[str]:
    return (" ".join(texts_of(self._traces[text].chat)) for text in texts)

  def use(self, vocab: Vocabulary, corpus: Corpus) -> None:
    """Encodes both splits.

    Raises: RequestError where the tokenizer lacks marks, or where nothing is left to learn.
    """
    self._encoder, self._vocab = chat_tokenizer(vocab.tokenizer), vocab.size
    for name in ("train", "validation"):
      texts = corpus.split(name)
      with phase(f"encoding the {name} split", len(texts)) as advance:
        self._pieces[name] = []
        for text in texts:
          self._pieces[name] += self._encode(self._traces[text])
          advance(1)
    if not self._pieces["train"]:
      raise RequestError(f"No training answer is learned: {'; '.join(self._names[:3])}.")

  def write(self, folder: pathlib.Path, name: str) -> Split:
    """Packs and writes the conversations of one split, and says what was written."""
    pieces, slots = self._pieces[name], self._room.slots
    conversations = [piece.conversation for piece in pieces]
    rows = list(pack_conversations(conversations, **self._room._asdict()))
    needs = [sum(self._room.needs(one)[1] for one in row) for row in rows]
    self._decoder_slots = max([self._decoder_slots, *needs])
    records = (encode_conversations(row, token_dtype(self._vocab)) for row in rows)
    shards = write_records(folder, name, records, rows=len(rows), slots=slots)
    tokens = sum(len(one.tokens) for one in conversations)
    return Split(
      documents=len(conversations),
      rows=len(rows),
      tokens=tokens,
      targets=sum(int(one.loss_mask.sum()) for one in conversations),
      bytes=sum(piece.answer_bytes for piece in pieces),
      padding_fraction=1 - tokens / (len(rows) * slots) if rows else 0.0,
      shards=shards,
    )

  def about(self) -> dict:
    """What metadata.json says of it, once all is written."""
    return {
      "contents": "chat",
      "decoder_slots": self._decoder_slots,
      "window": self._room.window,
      "dropped_names": self._names,
    }

  def _encode(self, trace: Trace) -> list[Piece]:
    """Every learned answer, in conversations that a row holds, or named as dropped."""
    if not any(message.learned for message in trace.chat.messages):
      self.dropped[NOTHING_LEARNED] += 1
      self._names.append(f"{trace.key}: no answer is learned")
      return []
    pieces: list[Piece] = []
    for view in views(trace.chat):
      found, too_long = split(*encode_turns(self._encoder, render(view)), self._room)
      pieces += found
      self.dropped[TOO_LONG] += len(too_long)
      self._names += [self._named(trace.key, answer) for answer in too_long]
    return pieces

  def _named(self, key: str, answer: TooLong) -> str:
    room = self._room
    needed = [f"{answer.slots} slots of {room.slots}"]
    if room.decoder_slots < UNLIMITED:
      needed.append(f"{answer.decoder_slots} decoder slots of {room.decoder_slots}")
    return f"{key} answer {answer.answer}: needs {' and '.join(needed)}"
