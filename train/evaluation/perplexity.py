"""How well a model predicts the validation part of prepared data.

Legend: B rows, T decoder slots, V vocabulary.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from data.errors import DataError
from data.pipeline import open_validation
from data.prepared import Prepared
from data.token_bytes import token_bytes
from deepseek_jax.layout import Layout
from train.errors import UsageError
from train.evaluate_loss import first_rows
from train.evaluation.model import EvaluatedModel
from train.evaluation.request import Request
from train.evaluation.task import Log, Metrics, Task
from train.processes import warn

# Tokens of the document before the one that is predicted; from 16 on each bucket has 4 times the
# reach of the one before. Our choice.
_FIRST_BUCKET, _FACTOR = 16, 4


@dataclasses.dataclass
class _Sums:
  nats: float = 0.0
  tokens: float = 0.0
  bytes: float = 0.0
  top: float = 0.0

  def add(self, log_p_X, top_X, weights_X, bytes_X) -> None:
    total = lambda x_X: float(np.sum(x_X * weights_X, dtype=np.float64))
    self.nats -= total(log_p_X)
    self.tokens += total(1.0)
    self.bytes += total(bytes_X)
    self.top += total(top_X)

  @property
  def bits_per_byte(self) -> float:
    return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def make(name: str, rest: str, request: Request) -> Task:
  """Bits per byte over all tokens, by folder of data, and by number of tokens before the token.

  A token's bytes are its own where the tokenizer says them (data/token_bytes.py), else the mean of
  its folder.
  """
  del rest, request
  metrics = ("bits_per_byte", "nats_per_token", "perplexity", "top1", "tokens", "bytes")
  return Task(name, metrics, _run, _problems)


def _problems(model: EvaluatedModel, request: Request) -> list[str]:
  del request
  held_out = [prepared for prepared in model.data if prepared.validation.rows]
  found = [] if held_out else ["perplexity needs data with a validation part; name some: --data."]
  for prepared in held_out:
    if model.slots_of(1, prepared.slots) != prepared.slots:
      found.append(
        f"{prepared.folder} has rows of {prepared.slots} slots, which ratios "
        f"{model.cfg.ratios} and --mesh do not divide."
      )
  return found


def _run(model: EvaluatedModel, request: Request, log: Log) -> Metrics:
  sums: dict[str, _Sums] = {"": _Sums()}  # of all, and of each source
  buckets: dict[int, _Sums] = defaultdict(_Sums)
  for source, prepared in _sources(model.data):
    of_token_V = token_bytes(model.tokenizer, model.cfg.vocab)
    mean = prepared.validation.bytes_per_token
    if prepared.contents == "chat" or of_token_V is None:
      of_token_V = np.full(model.cfg.vocab, mean)
    for records, layout in _batches(model, prepared, request.limit):
      scores = model.score(layout)
      position_BT = np.take_along_axis(
        layout.positions, np.maximum(layout.decoder_slots, 0), axis=1
      )
      bucket_BT = _bucket(position_BT + 1)
      values = scores.log_p_BT, scores.is_top_BT, layout.weights, of_token_V[layout.targets]
      for place in ("", f"_of_{source}"):
        sums.setdefault(place, _Sums()).add(*values)
      for number in np.unique(bucket_BT[layout.weights > 0]):
        chosen = bucket_BT == number
        buckets[int(number)].add(*(value[chosen] for value in values))
      for row, record in enumerate(records):
        if record:
          own = _Sums()
          own.add(*(value[row] for value in values))
          log({"record": record, "source": source, **dataclasses.asdict(own)})
  named = {_bucket_name(number): buckets[number] for number in sorted(buckets)}
  return _metrics(sums | named)


def _metrics(sums: dict[str, _Sums]) -> Metrics:
  whole = sums.pop("")
  tokens = max(whole.tokens, 1)
  metrics: dict[str, Any] = {
    "bits_per_byte": whole.bits_per_byte,
    "nats_per_token": whole.nats / tokens,
    "perplexity": math.exp(min(whole.nats / tokens, 700)),  # more is no float
    "top1": whole.top / tokens,
    "tokens": whole.tokens,
    "bytes": whole.bytes,
  }
  return metrics | {f"bits_per_byte{place}": own.bits_per_byte for place, own in sums.items()}


def _sources(data: tuple[Prepared, ...]) -> Iterator[tuple[str, Prepared]]:
  """Each folder with a validation part, under its own name, or its path if two are named alike."""
  names = Counter(prepared.folder.name for prepared in data)
  for prepared in data:
    if prepared.validation.rows:
      alone = names[prepared.folder.name] == 1
      yield prepared.folder.name if alone else str(prepared.folder), prepared


def _batches(
  model: EvaluatedModel, prepared: Prepared, limit: int | None
) -> Iterator[tuple[tuple[str, ...], Layout]]:
  """Names of the rows, and the rows; those behind the limit weigh nothing."""
  rows = prepared.validation.rows if limit is None else min(limit, prepared.validation.rows)
  data = dataclasses.replace(
    model.settings.data,
    paths=(str(prepared.folder),),
    weights=(),
    slots=prepared.slots,
    batch_rows=model.rows_of(prepared.slots),
  )
  engram = model.cfg.engram if model.cfg.engram.layers else None
  try:
    batches = open_validation(data, ratios=model.cfg.ratios, engram=engram)
    left = rows
    for batch in first_rows(batches, rows):
      yield batch.records[:left], batch.layout
      left -= len(batch.records)
  except (DataError, ValueError) as error:
    raise UsageError(str(error).splitlines()) from error
  if batches.damaged:
    names = ", ".join(batches.damaged)
    warn(f"{len(batches.damaged)} damaged records were left out: {names}.")


def _bucket(before_BT: np.ndarray) -> np.ndarray:
  """Number of the bucket for a token with so many before it."""
  ratio = np.maximum(before_BT, 1) / _FIRST_BUCKET
  return np.maximum(np.floor(np.log(ratio) / np.log(_FACTOR) + 1e-9).astype(int) + 1, 0)


def _bucket_name(number: int) -> str:
  first = 0 if number == 0 else _FIRST_BUCKET * _FACTOR ** (number - 1)
  return f"_after_{first}_to_{_FIRST_BUCKET * _FACTOR**number - 1}"
