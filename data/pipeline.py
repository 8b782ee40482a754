"""Prepared rows -> batches: the same global order for every number of hosts, resumable anywhere.

Rows are numbered globally: step s reads rows s * B ... (s + 1) * B - 1 of the shuffled, mixed and
repeated stream (B = batch_rows), and host h of n takes every n-th of them from h on. A position in
the data is therefore one number, the next step.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from data.config import DataConfig
from data.errors import DataError
from data.prepared import Prepared, Split, load_prepared
from data.replay import Place, RowLayouts, is_replayed
from data.source import Row, RowSource
from data.watchdog import next_within
from deepseek_jax.config import EngramConfig
from deepseek_jax.layout import Layout, stack_layouts
from deepseek_jax.ngram import NgramHash

if TYPE_CHECKING:
  import grain

ROWS_AT_MOST = 2**62  # Grain counts batches in floats, which overflow from its own limit, 2^63 - 1


class Batch(NamedTuple):
  layout: Layout  # this host's rows
  records: tuple[str, ...]  # SHARD:INDEX of each row, "" for an empty one

  @property
  def packing(self) -> dict[str, float]:
    """Shares of this host's slots: "encoder_fill" hold tokens, of which "replay_copies" stand there
    a second time; "decoder_fill" of the decoder slots are in use.
    """
    layout = self.layout
    return {
      "encoder_fill": float(np.mean(layout.document >= 0)),
      "decoder_fill": float(np.mean(layout.decoder_slots >= 0)),
      "replay_copies": float(np.mean(layout.is_copy)),
    }


class _Read(NamedTuple):
  """A row, and what decides how it is laid out."""

  row: Row
  place: Place
  replayed: bool


class _Built(NamedTuple):
  batch: Batch
  damaged: tuple[str, ...]


class Pipeline:
  """Endless training batches of one host, with a position that can be saved and restored."""

  def __init__(self, batches: "grain.MapDataset", cfg: DataConfig, identity: dict, tokenizer: str):
    self._batches = _Reader(batches, cfg)
    self._identity = identity
    self.tokenizer = tokenizer  # SHA-256 of it
    self._next_step = 0

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    """The next batch. Raises DataError on a stall and on too many damaged records."""
    batch = next(self._batches)
    self._next_step += 1
    return batch

  @property
  def damaged(self) -> tuple[str, ...]:
    """SHARD:INDEX of the records that were skipped since this pipeline was opened."""
    return tuple(self._batches.damaged)

  @property
  def fingerprint(self) -> str:
    """Of everything that decides which rows a step reads."""
    return hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()

  def state(self) -> dict:
    """The position, as plain JSON values. It holds for any number of hosts.

    With the tokenizer's SHA-256, for runs that start from the parameters of this one.
    """
    return {
      "next_step": self._next_step,
      "identity": self._identity,
      "tokenizer": self.tokenizer,
    }

  def restore(self, state: dict) -> None:
    """Goes on from a saved position. Raises DataError when it belongs to another order of rows."""
    saved = state["identity"]
    for name, now in self._identity.items():
      if saved.get(name) != now:
        raise DataError(
          f"The saved position in the data was made with {name} = {saved.get(name)}, but this run "
          f"has {now}; continue with the former or start another run."
        )
    self._next_step = state["next_step"]
    self._batches.seek(self._next_step)


class ValidationPass:
  """The validation rows of every folder, once and in fixed order, each time it is iterated.

  The last batch is filled up with empty rows, so that all hosts take equally many steps. In place
  of a damaged record stands an empty row.
  """

  def __init__(self, batches: "grain.MapDataset", cfg: DataConfig):
    self._batches, self._cfg = batches, cfg
    self.damaged: tuple[str, ...] = ()  # found by the latest pass

  def __len__(self) -> int:
    """Steps of one pass."""
    return len(self._batches)

  def __iter__(self) -> Iterator[Batch]:
    reader = _Reader(self._batches, self._cfg)
    for batch in reader:
      self.damaged = tuple(reader.damaged)
      yield batch


def open_pipeline(
  cfg: DataConfig,
  *,
  ratios: Sequence[int],
  engram: EngramConfig | None,
  host: int = 0,
  hosts: int = 1,
  window: int | None = None,
  begin: Sequence[int] = (),
) -> Pipeline:
  """Training batches of host `host` of `hosts`.

  Args:
    cfg: without problems.
    ratios: compression ratios to lay entries out for.
    engram: the tables to hash rows for; None for none.
    host: which host this is, from 0.
    hosts: their number, a divisor of cfg.batch_rows.
    window: slots of the model's window; None makes every step exact, whatever cfg.replay says.
    begin: rows of each folder that are left out, those of an earlier stage; empty: none.

  Raises: ValueError where cfg, hosts or engram do not fit the data, DataError for damaged files.
  """
  import grain  # imports JAX where that is installed, which importing this module must not

  folders = _load(cfg, engram, hosts)
  open_rows = lambda prepared: RowSource(
    prepared, "train", replace=True, max_damaged=cfg.max_damaged_records
  )
  begin = tuple(begin) or (0,) * len(folders)
  streams = [
    grain.MapDataset.source(open_rows(prepared))
    .shuffle(seed=cfg.shuffle_seed)
    .repeat()
    .map_with_index(_locator(folder, prepared.train.rows))
    .slice(slice(first, ROWS_AT_MOST))
    for folder, (prepared, first) in enumerate(zip(folders, begin, strict=True))
  ]
  weights = _weights(cfg)
  share = 0.0 if window is None else cfg.replay.share
  rows = grain.MapDataset.mix(streams, weights).map_with_index(
    lambda n, read: read._replace(replayed=is_replayed(n // cfg.batch_rows, share))
  )
  identity = {
    "data": [prepared.fingerprint[:16] for prepared in folders],
    "weights": list(weights),
    "slots": cfg.slots,
    "batch_rows": cfg.batch_rows,
    "shuffle_seed": cfg.shuffle_seed,
    **({"begin": list(begin)} if any(begin) else {}),
  }
  if share:
    identity["replay"] = dataclasses.asdict(cfg.replay) | {"window": window}
  build = _row_builder(cfg, folders[0], ratios, engram, window)
  batches = _batches(rows, cfg, build, host, hosts)
  return Pipeline(batches, cfg, identity, folders[0].tokenizer_sha256)


def open_validation(
  cfg: DataConfig,
  *,
  ratios: Sequence[int],
  engram: EngramConfig | None,
  host: int = 0,
  hosts: int = 1,
  window: int | None = None,
  replayed: bool = False,
) -> ValidationPass:
  """Validation batches of host `host` of `hosts`, all exact or all replayed.

  Other arguments and errors as for open_pipeline. Hits are those of epoch 0, in every pass.
  """
  import grain

  folders = [prepared for prepared in _load(cfg, engram, hosts) if prepared.validation.rows]
  if not folders:
    raise ValueError("data.paths: none of the folders has a validation split.")
  sources = [
    RowSource(prepared, "validation", replace=False, max_damaged=cfg.max_damaged_records)
    for prepared in folders
  ]
  missing = -sum(len(source) for source in sources) % cfg.batch_rows
  parts = [grain.MapDataset.source(source) for source in sources]
  if missing:
    parts.append(grain.MapDataset.source([Row("", [])] * missing))
  rows = grain.MapDataset.concatenate(parts)
  rows = rows.map_with_index(lambda n, row: _Read(row, Place(0, 0, n), replayed))
  build = _row_builder(cfg, folders[0], ratios, engram, window)
  batches = _batches(rows, cfg, build, host, hosts)
  return ValidationPass(batches, cfg)


def rows_of_folders(cfg: DataConfig, rows: int) -> tuple[int, ...]:
  """How many of the first `rows` rows come from each folder."""
  import grain

  numbered = [
    grain.MapDataset.range(ROWS_AT_MOST).map(lambda row, folder=folder: (folder, row))
    for folder in range(len(cfg.paths))
  ]
  mixed = grain.MapDataset.mix(numbered, _weights(cfg))
  found = dict.fromkeys(range(len(cfg.paths)), 0)
  for place in range(rows - 1, -1, -1):  # back to the last row of every folder
    folder, row = cast(tuple[int, int], mixed[place])
    found[folder] = found[folder] or row + 1
    if all(found.values()):
      break
  return tuple(found.values())


def validation_split(cfg: DataConfig) -> Split:
  """The validation splits of all folders as one, for bits per byte."""
  splits = [load_prepared(path).validation for path in cfg.paths]
  total = lambda name: sum(getattr(split, name) for split in splits)
  tokens, rows = total("tokens"), total("rows")
  return Split(
    documents=total("documents"),
    rows=rows,
    tokens=tokens,
    targets=total("targets"),
    bytes=total("bytes"),
    padding_fraction=1 - tokens / max(rows * cfg.slots, 1),
    shards=tuple(shard for split in splits for shard in split.shards),
  )


class _Reader:
  """Batches in order, built ahead by Grain's threads, with damage counted as it is delivered."""

  def __init__(self, batches: "grain.MapDataset", cfg: DataConfig):
    import grain

    options = grain.ReadOptions(
      num_threads=cfg.reader_threads, prefetch_buffer_size=cfg.prefetch_batches
    )
    self._iterator = iter(batches.to_iter_dataset(options))
    self._cfg = cfg
    self.damaged: dict[str, None] = {}  # a set in the order of discovery

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    built = next_within(self._iterator, self._cfg.stall_seconds)
    self.damaged |= dict.fromkeys(built.damaged)
    if len(self.damaged) > self._cfg.max_damaged_records:
      raise DataError(
        f"{len(self.damaged)} damaged records are more than data.max_damaged_records "
        f"({self._cfg.max_damaged_records}): {', '.join(self.damaged)}."
      )
    return built.batch

  def seek(self, step: int) -> None:
    import grain

    grain.experimental.set_next_index(self._iterator, step)


def _weights(cfg: DataConfig) -> tuple[float, ...]:
  return cfg.weights or (1.0,) * len(cfg.paths)


def _load(cfg: DataConfig, engram: EngramConfig | None, hosts: int) -> list[Prepared]:
  problems = cfg.problems()
  if hosts < 1 or cfg.batch_rows % hosts:
    problems.append(f"data.batch_rows ({cfg.batch_rows}) must be a multiple of {hosts} hosts.")
  if problems:
    raise ValueError("\n".join(problems))
  folders = [load_prepared(path) for path in cfg.paths]
  if engram is not None and engram.pad_token != folders[0].pad:
    raise ValueError(
      f"model.engram.pad_token is {engram.pad_token}, but the pad token of {folders[0].folder} "
      f"is {folders[0].pad}."
    )
  return folders


def _locator(folder: int, rows: int) -> Callable[[int, Row], _Read]:
  """Marks each row of an endless stream, whose epochs have `rows` rows."""
  return lambda n, row: _Read(row, Place(folder, n // rows, row.number), replayed=False)


def _row_builder(
  cfg: DataConfig,
  prepared: Prepared,
  ratios: Sequence[int],
  engram: EngramConfig | None,
  window: int | None,
) -> Callable[[_Read], _Built]:
  hashing = NgramHash(engram, prepared.compressed_id()) if engram is not None else None
  layouts = RowLayouts(cfg, ratios, hashing, window)

  def build(read: _Read) -> _Built:
    row, place, replayed = read
    layout = layouts.replayed(row, place) if replayed else layouts.exact(row)
    return _Built(Batch(layout, (row.record,)), row.damaged)

  return build


def _batches(
  rows: "grain.MapDataset",
  cfg: DataConfig,
  build: Callable[[_Read], _Built],
  host: int,
  hosts: int,
) -> "grain.MapDataset":
  own = rows.slice(slice(host, ROWS_AT_MOST, hosts)).map(build)
  return own.batch(cfg.batch_rows // hosts, batch_fn=_join)


def _join(rows: Sequence[_Built]) -> _Built:
  layout = stack_layouts([row.batch.layout for row in rows])
  records = tuple(row.batch.records[0] for row in rows)
  return _Built(Batch(layout, records), tuple(name for row in rows for name in row.damaged))
