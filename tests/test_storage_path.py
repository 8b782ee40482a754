"""Objects of a real S3 server: written whole, listed by folder, and by one writer at a time."""

import pathlib
import subprocess
import sys
import threading

import pytest

from deepseek_jax.storage_path import (
  RemotePath,
  storage_path,
  upload_tree,
  url_problem,
  write_atomically,
)

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def folder(s3):
  return storage_path(f"{s3}/runs//a/")


def test_a_url_is_an_object_and_anything_else_a_local_path(s3):
  assert str(storage_path(f"{s3}/runs//a/") / "x") == f"{s3}/runs/a/x"
  assert storage_path("runs/a") == pathlib.Path("runs/a")


@pytest.mark.parametrize(
  "text", ["http://host/x", "s3:///x", "s3://bucket", "gs://bucket/", "s4://b/x"]
)
def test_a_url_that_can_be_no_folder_is_named_with_what_is_accepted(text):
  problem = url_problem("--workdir", text)
  assert problem == (
    "--workdir must be a local folder or one of s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, "
    f"got {text}."
  )


@pytest.mark.parametrize("text", ["runs/a", "/x:y", "s3://bucket/a", "gs://bucket/a/b"])
def test_a_folder_is_no_problem(text):
  assert url_problem("--workdir", text) is None


def test_what_is_written_is_read_and_what_is_removed_is_not_there(folder):
  path = folder / "x" / "y"
  write_atomically(path, b"one")
  write_atomically(path, b"two")
  assert path.read_bytes() == b"two" and path.is_file()
  path.unlink()
  path.unlink()
  assert not path.is_file()
  with pytest.raises(FileNotFoundError, match=str(path)):
    path.read_bytes()


def test_a_folder_is_what_lies_below_it_and_not_its_neighbours(folder):
  for name in ("b/1", "b/2", "c"):
    (folder / name).write_bytes(b"")
  (folder.parent / "ab").write_bytes(b"")
  (folder.parent / "a").write_bytes(b"")
  assert folder.names_below() == ["b/1", "b/2", "c"]
  assert folder.names_below("b") == ["b/1", "b/2"]
  folder.remove_tree()
  assert folder.parent.names_below() == ["a", "ab"]


def test_a_local_tree_arrives_whole(folder, tmp_path):
  files = {f"d{n % 3}/{n}": bytes([n]) * n for n in range(40)}
  for name, data in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
  upload_tree(tmp_path, folder)
  assert {name: (folder / name).read_bytes() for name in folder.names_below()} == files


def test_of_many_that_create_an_object_exactly_one_succeeds(folder):
  start, created = threading.Barrier(8), []

  def create(number):
    start.wait()
    if (folder / "one").create_if_absent(b"%d" % number):
      created.append(b"%d" % number)

  threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [(folder / "one").read_bytes()] == created


def test_a_write_on_the_condition_of_an_old_generation_changes_nothing(folder):
  path = folder / "x"
  first = path.create_if_absent(b"one")
  second = path.write_if_unchanged(b"two", first)
  assert second and path.write_if_unchanged(b"three", first) is None
  path.unlink_if_unchanged(first)
  assert path.read_bytes() == b"two"
  path.unlink_if_unchanged(second)
  assert not path.is_file()


def test_a_bucket_that_is_not_there_is_named(s3):
  missing = RemotePath("s3", "no-such-bucket", "x")
  with pytest.raises(OSError, match="no-such-bucket/x") as error:
    missing.write_bytes(b"")
  assert error.value.strerror.startswith("there is no bucket no-such-bucket on http://127.0.0.1:")


def test_a_server_that_does_not_answer_is_named_with_what_to_set(s3, monkeypatch):
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  with pytest.raises(OSError) as error:
    storage_path(f"{s3}/x").read_bytes()
  assert error.value.strerror == (
    "http://127.0.0.1:9 cannot be reached (see AWS_ENDPOINT_URL and the network)"
  )


def test_nothing_but_our_own_sentences_reaches_the_screen(s3):
  program = f"""
from deepseek_jax.storage_path import storage_path
path = storage_path("{s3}/x")
path.write_bytes(b"1")
print(path.read_bytes())
"""
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert (done.stdout, done.stderr) == ("b'1'\n", "")
