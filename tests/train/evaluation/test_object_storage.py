"""Runs in an S3 store are evaluated, and write on, as local ones do; so do copies out of it."""

import json
import shutil

import pytest

from deepseek_jax.storage_path import storage_path, upload_tree
from tests.train.evaluation.conftest import STEPS, write_run
from train.__main__ import main
from train.errors import Exit


@pytest.fixture
def stored(s3, prepared):
  """The run of `trained`, written to a store."""
  folder = storage_path(f"{s3}/runs/a")
  write_run(folder, prepared)
  return folder


def download(remote, folder):
  for name in remote.names_below():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes((remote / name).read_bytes())
  return folder


def evaluated(run, folder):
  """Results of the last step, written below a folder, with samples beside them."""
  words = ["--tasks=perplexity", "--rows=2", "--limit=4"]
  words += [f"--output={folder}/results.json", f"--log-samples={folder}/samples.jsonl"]
  assert main(["evaluate", f"--checkpoint={run}", *words]) == Exit.DONE
  assert storage_path(f"{folder}/samples.jsonl").read_text()
  records = json.loads(storage_path(f"{folder}/results.json").read_text())
  return [(record["step"], record["results"]) for record in records]


def text(run, capsys):
  words = ["--prompt=expert router", "--max-new-tokens=8", "--temperature=0"]
  assert main(["generate", f"--checkpoint={run}", *words]) == Exit.DONE
  return capsys.readouterr().out


@pytest.mark.slow
def test_a_run_in_a_store_is_as_good_as_a_local_one_and_so_is_its_copy(
  trained, stored, s3, tmp_path, capsys
):
  copy = download(stored, tmp_path / "copy")
  local = evaluated(trained, tmp_path)
  assert [step for step, _ in local] == [STEPS[-1]]
  assert evaluated(stored, f"{s3}/results") == local
  capsys.readouterr()
  texts = {text(run, capsys) for run in (trained, stored, copy)}
  assert len(texts) == 1 and texts.pop().strip()
  (target := tmp_path / "copied").mkdir()
  assert evaluated(copy, target) == local
  assert main(["inspect", f"--checkpoint={copy}"]) == Exit.DONE


@pytest.mark.slow
def test_a_local_run_that_was_copied_into_a_store_is_a_sentence(trained, s3, tmp_path, capsys):
  upload_tree(shutil.copytree(trained, tmp_path / "run"), storage_path(f"{s3}/runs/a"))
  for verb in (["generate", "--prompt=a"], ["evaluate", "--tasks=perplexity"], ["inspect"]):
    assert main([*verb, f"--checkpoint={s3}/runs/a"]) == Exit.USAGE
    assert "was written to a local folder and cannot be read in a store" in capsys.readouterr().err
