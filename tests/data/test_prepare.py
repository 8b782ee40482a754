"""A preparation holds all of its text, once, the same on every run; or it does not exist."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.errors import RequestError
from data.prepare.corpus import select
from data.prepare.run import existing, prepare
from data.prepare.shards import write_split
from data.prepare.sources import SourceText, read_source
from data.prepared import load_prepared
from data.source import RowSource
from train import prepare as program
from train.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
  code = "import sys; from train import prepare; sys.exit(prepare.main(sys.argv[1:]))"
  return [sys.executable, "-c", code, *arguments]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents_of(prepared, split: str) -> list[list[int]]:
  """The documents of a split, put together again from their pieces."""
  source = RowSource(prepared, split, replace=False, max_damaged=0)
  documents: list[list[int]] = [[]]
  for number in range(len(source)):
    for piece in source[number].documents:
      documents[-1] += piece.tokens.tolist()
      if piece.next_token < 0:
        documents.append([])
  return documents[:-1]


def test_two_runs_write_identical_bytes(text_folder, tmp_path):
  for name in ("first", "second"):
    arguments = ["--source", f"folder:{text_folder}", "--out", str(tmp_path / name)]
    arguments += ["--tokenizer", "train:400", "--validation-share", "0.2"]
    environment = os.environ | {"PYTHONHASHSEED": "1" if name == "first" else "2"}
    subprocess.run(command(*arguments), cwd=ROOT, env=environment, check=True)
  first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
  assert "metadata.json" in first
  assert first == second


def test_rows_hold_every_document_whole_and_in_one_split(prepared, text_folder):
  tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
  texts = {}
  for name in ("train", "validation"):
    documents = documents_of(prepared, name)
    assert all(d[0] == prepared.bos and d[-1] == prepared.eos for d in documents)
    texts[name] = [tokenizer.decode(d[1:-1], skip_special_tokens=False) for d in documents]
    split = prepared.split(name)
    assert split.documents == len(documents)
    assert split.tokens == sum(map(len, documents))
    assert split.bytes == sum(len(text.encode()) for text in texts[name])
  files = {path.read_text() for path in text_folder.rglob("*.*")} - {""}
  assert set(texts["train"]) | set(texts["validation"]) == files
  assert set(texts["train"]).isdisjoint(texts["validation"])
  assert len(texts["train"]) + len(texts["validation"]) == len(files)


def test_padding_is_in_the_last_row_only(prepared):
  slots = prepared.train.rows * prepared.slots
  assert 0 <= slots - prepared.train.tokens < prepared.slots
  assert prepared.train.padding_fraction == pytest.approx(1 - prepared.train.tokens / slots)


def test_rows_are_the_same_in_any_number_of_shards(tmp_path):
  documents = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 40, 1, 33)]
  names = []
  for shard_tokens in (8, 24, 1000):
    folder = tmp_path / str(shard_tokens)
    folder.mkdir()
    split = write_split(
      folder, "train", documents, text_bytes=1, slots=8, vocab=100, shard_tokens=shard_tokens
    )
    names.append([shard.rows for shard in split.shards])
  assert names == [[1] * 10, [3, 3, 3, 1], [10]]


def test_exact_duplicates_are_in_one_split_only():
  texts = [SourceText(f"{number}.txt", f"text {number % 50}") for number in range(200)]
  corpus = select(texts, validation_share=0.4)
  assert set(corpus.train).isdisjoint(corpus.validation)
  assert len(corpus.train) + len(corpus.validation) == 50
  assert corpus.dropped["duplicate"] == 150


def test_a_new_document_moves_no_other_one():
  texts = [SourceText(f"{number}.txt", f"text {number}") for number in range(100)]
  before = select(texts[:90], validation_share=0.3)
  after = select(texts, validation_share=0.3)
  for name in ("train", "validation"):
    kept = [text for text in after.split(name) if int(text.removeprefix("text ")) < 90]
    assert kept == before.split(name)


def test_what_is_no_text_is_left_out_and_counted(tmp_path):
  (tmp_path / "good.txt").write_text("good")
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
  (tmp_path / "binary.bin").write_bytes(b"a\0b")
  (tmp_path / ".hidden").write_text("hidden")
  corpus = select(read_source(f"folder:{tmp_path}"), validation_share=0.0)
  assert corpus.train == ["good"]
  assert (corpus.dropped["empty"], corpus.dropped["not text"]) == (1, 2)


def test_the_limit_holds_in_bytes():
  texts = [SourceText(str(number), f"{number:03d}" * 100) for number in range(100)]
  corpus = select(texts, validation_share=0.5, max_bytes=5000)
  assert sum(map(len, corpus.train + corpus.validation)) == 4800
  assert corpus.dropped["over the limit"] == 84


@pytest.mark.slow
def test_a_killed_run_leaves_no_metadata_and_the_next_one_completes(tmp_path):
  arguments = command("--out", str(tmp_path), "--max-megabytes", "2", "--tokenizer", "train:600")
  process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)
  while not (tmp_path / "tokenizer.json").exists():
    assert process.poll() is None
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert not (tmp_path / "metadata.json").exists()
  subprocess.run(arguments, cwd=ROOT, check=True)
  assert load_prepared(tmp_path).train.rows > 0


def test_the_same_request_does_nothing_and_another_is_refused(prepared, request_of):
  before = contents(prepared.folder)
  assert existing(request_of(), prepared.folder) == prepared
  with pytest.raises(RequestError, match=r"slots=64.*slots=32 is asked for"):
    existing(request_of(slots=32), prepared.folder)
  assert contents(prepared.folder) == before


def test_a_preparation_that_lost_or_changed_a_file_is_not_taken_for_a_good_one(
  prepared, request_of, tmp_path
):
  folder = shutil.copytree(prepared.folder, tmp_path / "copy")
  (folder / "compressed_id.npy").write_bytes(b"")
  shard = prepared.train.shards[0].name
  (folder / shard).unlink()
  with pytest.raises(RequestError, match=rf"{shard}, compressed_id.npy is missing or has changed"):
    existing(request_of(), folder)


def test_all_problems_are_given_at_once(tmp_path):
  arguments = ["--out", str(tmp_path), "--slots", "x", "--validation-share", "2", "--slotz=3"]
  with pytest.raises(UsageError) as caught:
    program.main([*arguments, "--tokenizer", "train:7"])
  slotz, slots, share, tokenizer = caught.value.problems
  assert "the nearest is --slots" in slotz
  assert "an integer, got 'x'" in slots
  assert "[0, 1), got 2.0" in share
  assert "259" in tokenizer


def test_sources_of_records_give_what_files_would(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  from pyarrow import parquet

  texts = ["one", "two ü", "three"]
  lines = [json.dumps({"text": text, "id": 1}) for text in texts]
  (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
  parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
  for kind in ("jsonl", "parquet"):
    for path in (tmp_path, tmp_path / f"a.{kind}"):
      read = list(read_source(f"{kind}:{path}"))
      assert [record.text for record in read] == texts
      assert len({record.key for record in read}) == 3


def test_bad_records_are_all_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "fine"}\nnot json\n{"body": "x"}\n')
  with pytest.raises(RequestError) as caught:
    list(read_source(f"jsonl:{path}"))
  assert [problem.split()[1] for problem in caught.value.problems] == ["2", "3"]


def test_an_empty_validation_split_is_refused(request_of, tmp_path):
  with pytest.raises(RequestError, match=r"None of the .* fell into the validation split"):
    prepare(request_of(validation_share=1e-9), tmp_path)
  assert not list(tmp_path.iterdir())


def test_files_of_somebody_else_are_left_alone(request_of, tmp_path):
  theirs = {"tokenizer.json": b"mine", "train-mine-of-me.array_record": b"mine too"}
  for name, content in theirs.items():
    (tmp_path / name).write_bytes(content)
  with pytest.raises(RequestError, match="holds files that are not of an unfinished preparation"):
    prepare(request_of(), tmp_path)
  assert contents(tmp_path) == theirs
