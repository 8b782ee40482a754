"""Prepared folders in an S3 store: written whole or not at all, read through checked copies."""

import dataclasses

import numpy as np
import pytest

from data.errors import DataError, RequestError
from data.pipeline import open_pipeline, open_validation
from data.prepare.run import existing, prepare
from data.prepared import METADATA, load_prepared
from deepseek_jax.storage_path import cache_folder, storage_path
from train.errors import Exit
from train.prepare import main


@pytest.fixture
def remote(request_of, s3):
  return prepare(request_of(), storage_path(f"{s3}/data"))


def batches(cfg, count):
  pipeline = open_pipeline(cfg, ratios=(4,), engram=None)
  return [next(pipeline).layout.tokens for _ in range(count)]


def test_a_remote_preparation_is_the_local_one(prepared, remote):
  assert dataclasses.replace(remote, folder=prepared.folder) == prepared
  assert load_prepared(str(remote.folder)) == remote
  names = {path.name for path in prepared.folder.iterdir()}
  assert set(remote.folder.names_below()) == names
  for name in names - {METADATA}:
    assert (remote.folder / name).read_bytes() == (prepared.folder / name).read_bytes()
  np.testing.assert_array_equal(remote.compressed_id(), prepared.compressed_id())


def test_the_same_rows_come_in_the_same_order(config_of, remote):
  local, other = config_of(), config_of(paths=(str(remote.folder),))
  assert other.problems() == []
  for a, b in zip(batches(local, 20), batches(other, 20), strict=True):
    np.testing.assert_array_equal(a, b)
  held_out = lambda cfg: [b.layout.tokens for b in open_validation(cfg, ratios=(), engram=None)]
  for a, b in zip(held_out(local), held_out(other), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_shard_is_fetched_once_and_records_bear_the_name_it_has_in_the_store(config_of, remote):
  cfg = config_of(paths=(str(remote.folder),))
  record = next(open_pipeline(cfg, ratios=(), engram=None)).records[0]
  assert record.startswith(f"{remote.folder}/train-00000-of-00001.array_record:")
  (copy,) = (cache_folder() / "data").iterdir()
  assert copy.name == remote.train.shards[0].sha256
  (remote.folder / remote.train.shards[0].name).unlink()
  assert len(batches(cfg, 1)) == 1


@pytest.mark.parametrize("harm", ["missing", "not the file that was prepared"])
def test_a_shard_that_is_gone_or_another_one_is_named_and_not_kept(config_of, remote, harm):
  path = remote.folder / remote.train.shards[0].name
  if harm == "missing":
    path.unlink()
  else:
    path.write_bytes(path.read_bytes()[:-1])
  cfg = config_of(paths=(str(remote.folder),))
  with pytest.raises(DataError, match=f"{path} is {harm}; prepare its folder again"):
    open_pipeline(cfg, ratios=(), engram=None)
  assert list((cache_folder() / "data").iterdir()) == []


def test_a_folder_without_metadata_is_no_preparation(request_of, remote, config_of):
  (remote.folder / METADATA).unlink()
  (remote.folder / ".unfinished").write_bytes(b"")
  (remote.folder / "train-00007-of-00009.array_record").write_bytes(b"")
  cfg = config_of(paths=(str(remote.folder),))
  assert "where no finished preparation lies" in cfg.problems()[0]
  assert existing(request_of(), remote.folder) is None
  again = prepare(request_of(), remote.folder)
  assert again == remote and ".unfinished" not in remote.folder.names_below()
  assert "train-00007-of-00009.array_record" not in remote.folder.names_below()


def test_objects_of_somebody_else_are_not_overwritten(request_of, s3):
  storage_path(f"{s3}/data/thesis.pdf").write_bytes(b"")
  with pytest.raises(RequestError, match="holds files that are not of an unfinished preparation"):
    prepare(request_of(), storage_path(f"{s3}/data"))
  assert storage_path(f"{s3}/data").names_below() == ["thesis.pdf"]


def test_the_verb_prepares_into_a_store_and_finds_it_done(text_folder, s3, capsys):
  argv = ["--source", f"folder:{text_folder}", "--tokenizer=train:300", "--slots=64"]
  argv += ["--validation-share=0.25", f"--out={s3}/data"]
  assert main(argv) == Exit.DONE
  assert capsys.readouterr().out.startswith(f"Prepared {s3}/data in ")
  assert main(argv) == Exit.DONE
  assert "already holds exactly this" in capsys.readouterr().out


def test_a_store_that_cannot_be_reached_is_named(config_of, s3, monkeypatch):
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  assert config_of(paths=(f"{s3}/data",)).problems()[0] == (
    f"data.paths names '{s3}/data', which cannot be read: http://127.0.0.1:9 cannot be reached "
    "(see AWS_ENDPOINT_URL and the network)."
  )


def test_local_data_are_read_where_they_lie(config_of, s3):
  assert len(batches(config_of(), 1)) == 1
  assert not cache_folder().exists()
