"""One global order of rows, whatever the number of hosts and wherever a run goes on."""

import json
import pathlib
import re
import shutil
import time
from collections import Counter

import numpy as np
import pytest

from data.config import DataConfig
from data.errors import DataError
from data.pipeline import (
  Batch,
  Pipeline,
  open_pipeline,
  open_validation,
  rows_of_folders,
  validation_split,
)
from data.prepare.run import prepare
from data.source import RowSource
from deepseek_jax.config import EngramConfig
from deepseek_jax.layout import build_layout
from deepseek_jax.ngram import NgramHash, hash_primes

RATIOS = (1, 2)


def open_hosts(cfg: DataConfig, hosts: int) -> list[Pipeline]:
  return [open_pipeline(cfg, ratios=(), engram=None, host=h, hosts=hosts) for h in range(hosts)]


def global_order(pipelines: list[Pipeline], steps: int) -> list[str]:
  """Records of the given steps in the order of the global batches."""
  order = []
  for _ in range(steps):
    parts = [next(pipeline).records for pipeline in pipelines]
    order += [record for rows in zip(*parts, strict=True) for record in rows]
  return order


def engram_of(prepared) -> EngramConfig:
  primes = hash_primes(1, 24, 500)
  return EngramConfig(
    layers=(1,),
    table_rows=(sum(primes[0]),),
    prime_start=500,
    pad_token=prepared.pad,
    compressed_vocab=prepared.compressed_classes,
  )


@pytest.fixture
def damaged_copy(prepared, tmp_path):
  """Copies the small preparation; flips bytes in the middle of a shard of the named split."""

  def build(split: str) -> str:
    folder = tmp_path / f"damaged-{split}"
    shutil.copytree(prepared.folder, folder)
    path = folder / prepared.split(split).shards[0].name
    data = bytearray(path.read_bytes())
    at = int(np.flatnonzero(np.frombuffer(data, np.uint8))[-1]) // 3
    data[at : at + 8] = bytes(byte ^ 0xFF for byte in data[at : at + 8])
    path.write_bytes(data)
    return str(folder)

  return build


def without_folder(records) -> list[str]:
  return [pathlib.Path(record).name for record in records]


def test_every_number_of_hosts_reads_the_same_global_batches(config_of):
  one = global_order(open_hosts(config_of(), 1), 30)
  assert len(set(one)) == 120
  for hosts in (2, 4):
    assert global_order(open_hosts(config_of(), hosts), 30) == one


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_restored_run_goes_on_where_the_saved_one_stood(config_of, hosts):
  cfg = config_of()
  whole = global_order(open_hosts(cfg, 1), 50)
  started = open_hosts(cfg, 2)
  first = global_order(started, 17)
  saved = json.dumps(started[1].state())
  resumed = open_hosts(cfg, hosts)
  for pipeline in resumed:
    next(pipeline)
    pipeline.restore(json.loads(saved))
  assert first + global_order(resumed, 33) == whole
  assert resumed[0].state()["next_step"] == 50
  assert len(saved) < 300


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"shuffle_seed": 4}, "shuffle_seed = 3, but this run has 4"),
    ({"batch_rows": 8}, "batch_rows = 4, but this run has 8"),
    ({"weights": (2.0,)}, r"weights = \[1.0\], but this run has \[2.0\]"),
  ],
  ids=["seed", "batch size", "mixture"],
)
def test_a_position_of_another_order_is_refused(config_of, changes, named):
  state = open_pipeline(config_of(), ratios=(), engram=None).state()
  other = open_pipeline(config_of(**changes), ratios=(), engram=None)
  with pytest.raises(DataError, match=named):
    other.restore(json.loads(json.dumps(state)))
  assert other.fingerprint != open_pipeline(config_of(), ratios=(), engram=None).fingerprint


def test_a_position_in_other_data_or_packing_is_refused(config_of, request_of, tmp_path):
  state = open_pipeline(config_of(), ratios=(), engram=None).state()
  for name, changes in (("data", {"max_megabytes": 0.1}), ("slots", {"slots": 32})):
    other = prepare(request_of(**changes), tmp_path / name)
    cfg = config_of(paths=(str(other.folder),), slots=other.slots)
    with pytest.raises(DataError, match="saved position in the data was made with data ="):
      open_pipeline(cfg, ratios=(), engram=None).restore(state)


def test_an_epoch_reads_every_row_once_and_the_next_one_in_another_order(config_of, prepared):
  rows = prepared.train.rows
  order = global_order(open_hosts(config_of(batch_rows=1), 1), 2 * rows)
  first, second = order[:rows], order[rows:]
  assert len(set(first)) == rows
  assert set(first) == set(second)
  assert first != second


def test_the_shuffle_is_the_one_that_saved_positions_rely_on():
  import grain

  rows = grain.MapDataset.range(100).shuffle(seed=3).repeat()
  assert [rows[i] for i in (0, 1, 2, 3, 4)] == [4, 7, 27, 57, 67]
  assert [rows[i] for i in (100, 101, 102)] == [13, 27, 12]


def test_folders_are_mixed_by_weight(config_of, prepared, tmp_path):
  paths = (str(prepared.folder), str(shutil.copytree(prepared.folder, tmp_path / "second")))
  order = global_order(open_hosts(config_of(paths=paths, weights=(3.0, 1.0)), 2), 50)
  shares = Counter(record.rpartition("/")[0] for record in order)
  assert shares == {paths[0]: 150, paths[1]: 50}


def test_a_later_stage_goes_on_in_every_folder_after_the_rows_of_the_first(
  config_of, prepared, tmp_path
):
  """Its mixture, its batches and its hosts may be others."""
  copy = str(shutil.copytree(prepared.folder, tmp_path / "copy"))
  paths = (str(prepared.folder), copy)
  first = config_of(paths=paths, weights=(3.0, 1.0))
  before = global_order(open_hosts(first, 1), 10)
  begin = rows_of_folders(first, 40)
  in_copy = sum(record.startswith(copy) for record in before)
  assert begin == (40 - in_copy, in_copy) and in_copy > 0
  later = config_of(paths=paths, weights=(1.0, 2.0), batch_rows=6)
  hosts = [
    open_pipeline(later, ratios=(), engram=None, host=h, hosts=2, begin=begin) for h in range(2)
  ]
  after = global_order(hosts, 9)
  for path in paths:
    alone = global_order(open_hosts(config_of(paths=(path,)), 1), 20)
    own = [record for record in before + after if record.startswith(path)]
    assert own == alone[: len(own)]


def test_a_position_belongs_to_the_stage_that_saved_it(config_of):
  saved = open_pipeline(config_of(), ratios=(), engram=None, begin=(8,))
  next(saved)
  again = open_pipeline(config_of(), ratios=(), engram=None, begin=(8,))
  again.restore(saved.state())
  assert next(again).records == next(saved).records
  with pytest.raises(DataError, match=r"begin = \[8\], but this run has \[4\]"):
    open_pipeline(config_of(), ratios=(), engram=None, begin=(4,)).restore(saved.state())


def test_folders_with_different_tokenizers_are_not_mixed(config_of, request_of, prepared, tmp_path):
  other = prepare(request_of(tokenizer="train:270"), tmp_path)
  cfg = config_of(paths=(str(prepared.folder), str(other.folder)))
  assert ["different tokenizers" in problem for problem in cfg.problems()] == [True]


def test_layouts_are_those_of_the_rows(config_of, prepared):
  engram = engram_of(prepared)
  batch = next(open_pipeline(config_of(), ratios=RATIOS, engram=engram))
  source = RowSource(prepared, "train", replace=True, max_damaged=0)
  hashing = NgramHash(engram, prepared.compressed_id())
  for b, record in enumerate(batch.records):
    row = source[int(record.rpartition(":")[2])]
    alone = build_layout(row.documents, slots=64, ratios=RATIOS, hashing=hashing)
    for name, value in alone._asdict().items():
      got = getattr(batch.layout, name)
      if isinstance(value, dict):
        for m in RATIOS:
          np.testing.assert_array_equal(got[m][b], value[m][0], err_msg=name)
      else:
        np.testing.assert_array_equal(got[b], value[0], err_msg=name)


def test_a_damaged_record_is_skipped_named_and_replaced_by_the_next(
  config_of, prepared, damaged_copy
):
  folder = damaged_copy("train")
  cfg = config_of(paths=(folder,), batch_rows=1)
  rows = prepared.train.rows
  pipeline = open_hosts(cfg, 1)[0]
  batches = [next(pipeline) for _ in range(rows)]
  assert len(pipeline.damaged) == 1
  shard, _, index = pipeline.damaged[0].rpartition(":")
  assert shard == f"{folder}/{prepared.train.shards[0].name}"
  instead = f"{shard}:{(int(index) + 1) % rows}"
  records = [batch.records[0] for batch in batches]
  assert pipeline.damaged[0] not in records
  assert records.count(instead) == 2
  assert {batch.layout.tokens.shape for batch in batches} == {(1, 64)}
  sound = global_order(open_hosts(config_of(batch_rows=1), 1), rows)
  differing = [
    a for a, b in zip(sound, records, strict=True) if a.split("/")[-1] != b.split("/")[-1]
  ]
  assert without_folder(differing) == without_folder(pipeline.damaged)
  assert global_order(open_hosts(config_of(paths=(folder,)), 4), 20) == records[:80]


def test_too_many_damaged_records_stop_the_run(config_of, prepared, damaged_copy):
  cfg = config_of(paths=(damaged_copy("train"),), max_damaged_records=0)
  pipeline = open_hosts(cfg, 1)[0]
  with pytest.raises(DataError, match=r"1 damaged records .* \(0\): .*train-00000.*:\d+\."):
    global_order([pipeline], prepared.train.rows)


def test_a_shard_that_is_cut_short_or_missing_is_named_when_opened(prepared, config_of, tmp_path):
  for name, harm in (
    ("short", lambda path: path.write_bytes(path.read_bytes()[:-5000])),
    ("missing", pathlib.Path.unlink),
  ):
    folder = pathlib.Path(shutil.copytree(prepared.folder, tmp_path / name))
    shard = folder / prepared.train.shards[0].name
    harm(shard)
    with pytest.raises(DataError, match=re.escape(str(shard))):
      open_pipeline(config_of(paths=(str(folder),)), ratios=(), engram=None)


def test_a_changed_compression_map_is_refused(prepared, config_of, tmp_path):
  folder = pathlib.Path(shutil.copytree(prepared.folder, tmp_path / "copy"))
  np.save(folder / "compressed_id.npy", np.zeros(prepared.vocab, np.int32))
  with pytest.raises(DataError, match=r"compressed_id\.npy is damaged"):
    open_pipeline(config_of(paths=(str(folder),)), ratios=(), engram=engram_of(prepared))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_validation_reads_every_row_once_in_order(config_of, prepared, hosts):
  passes = [
    open_validation(config_of(), ratios=(), engram=None, host=h, hosts=hosts) for h in range(hosts)
  ]
  for _ in range(2):
    batches = [list(one) for one in passes]
    assert {len(own) for own in batches} == {len(passes[0])} == {-(-prepared.validation.rows // 4)}
    steps = [[b.records for b in step] for step in zip(*batches, strict=True)]
    order = [record for parts in steps for rows in zip(*parts, strict=True) for record in rows]
    indices = [int(record.rpartition(":")[2]) for record in order if record]
    assert indices == list(range(prepared.validation.rows))
    targets = sum(int(batch.layout.weights.sum()) for own in batches for batch in own)
    assert targets == prepared.validation.targets == validation_split(config_of()).targets


def test_a_damaged_validation_record_becomes_an_empty_row(config_of, prepared, damaged_copy):
  sound = list(open_validation(config_of(), ratios=(), engram=None))
  one = open_validation(config_of(paths=(damaged_copy("validation"),)), ratios=(), engram=None)
  batches = list(one)
  assert len(one.damaged) == 1

  def rows(some: list[Batch]) -> np.ndarray:
    return np.concatenate([batch.layout.tokens for batch in some])

  differing = np.flatnonzero((rows(sound) != rows(batches)).any(axis=1))
  assert differing.tolist() == [int(one.damaged[0].rpartition(":")[2])]
  assert not rows(batches)[differing].any()


def test_all_problems_of_a_configuration_are_given_at_once(prepared, tmp_path):
  cfg = DataConfig(
    paths=(str(prepared.folder), str(tmp_path)), weights=(1.0,), slots=7, batch_rows=0
  )
  problems = " ".join(cfg.problems())
  for part in ("1 values for 2 paths", "batch_rows must be", "slots is 7", f"'{tmp_path}', where"):
    assert part in problems
  assert len(cfg.problems()) == 4


def test_batches_come_far_faster_than_a_cpu_trains(config_of, prepared):
  pipeline = open_pipeline(config_of(batch_rows=16), ratios=RATIOS, engram=engram_of(prepared))
  next(pipeline)
  began = time.monotonic()
  for _ in range(50):
    next(pipeline)
  assert 50 * 16 * 64 / (time.monotonic() - began) > 10_000  # tokens/s
