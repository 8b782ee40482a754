"""The lock of a run folder in a store: one owner, alive as long as it renews it."""

import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from deepseek_jax.storage_path import storage_path
from train.errors import UsageError
from train.remote_lock import RemoteLock

ROOT = pathlib.Path(__file__).parents[2]
QUICK = {"heartbeat": 0.05, "stale": 1.5}


@pytest.fixture
def folder(s3):
  return storage_path(f"{s3}/run")


@pytest.fixture
def take(folder):
  """Makes locks with short times; those that are left at the end are renewed no more."""
  locks = []

  def make(said=None, **changes):
    report = (lambda sentence: None) if said is None else said.append
    locks.append(RemoteLock(folder, report, **(QUICK | changes)))
    return locks[-1]

  yield make
  for lock in locks:
    lock._released.set()
    lock._thread.join()


def test_a_lock_that_is_renewed_is_refused_naming_its_owner(folder, take):
  lock = take()
  with pytest.raises(UsageError) as error:
    take()
  owner = f"process {os.getpid()} on {socket.gethostname()} since 2"
  (sentence,) = error.value.problems
  assert sentence.startswith(f"{folder} is in use by {owner}")
  lock.release()


def test_a_released_lock_is_free_without_a_word(folder, take):
  said = []
  for _ in range(2):
    lock = take(said)
    lock.release()
    lock.release()
  assert said == [] and folder.names_below() == []


def test_a_lock_that_nobody_renews_is_taken_over_only_after_the_stated_time(folder, take):
  dead = take(heartbeat=3600)._owner  # as if its process had been killed
  said, began = [], time.monotonic()
  lock = take(said)
  assert time.monotonic() - began >= QUICK["stale"]
  assert said == [
    f"{folder} is locked by {dead}; waiting up to 2 s for a sign of life.",
    f"Took over {folder} from {dead}, which no longer renews it.",
  ]
  lock.release()


HOLDER = """
import os, sys
from deepseek_jax.storage_path import storage_path
from train.remote_lock import RemoteLock
RemoteLock(storage_path(sys.argv[1]), report=print)
print(os.getpid(), flush=True)
os._exit(1)
"""


def test_a_process_of_this_machine_that_has_died_is_not_waited_for(folder, take):
  done = subprocess.run(
    [sys.executable, "-c", HOLDER, str(folder)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  said = []
  lock = take(said, stale=3600)
  (sentence,) = said
  assert sentence.startswith(f"Took over {folder} from process {int(done.stdout)} on "), done.stderr
  lock.release()


def test_of_many_that_find_a_dead_lock_exactly_one_takes_it_over(folder, take):
  take(heartbeat=3600)
  start, taken, refused = threading.Barrier(4), [], []

  def compete():
    start.wait()
    try:
      taken.append(take())
    except UsageError as error:
      refused.extend(error.problems)

  threads = [threading.Thread(target=compete) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(taken) == 1
  assert len(refused) == 3 and all("is in use by" in problem for problem in refused)
  taken[0].release()


def test_a_run_that_was_thought_dead_learns_it_and_does_not_take_the_lock_back(folder, take):
  said, lost = [], threading.Event()
  sleeper = take(said, heartbeat=2.5, lost=lost.set)
  lock = take()
  assert lost.wait(10)
  assert said == [f"Another run has taken over {folder}; this one ends."]
  sleeper.release()
  with pytest.raises(UsageError, match="is in use by"):
    take()
  lock.release()


def test_a_store_that_is_away_for_a_while_does_not_end_the_run(
  folder, take, monkeypatch, s3_server
):
  said, lost = [], threading.Event()
  lock = take(said, lost=lost.set)
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  time.sleep(0.5)
  monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
  before = (folder / "run.lock").read_bytes()
  deadline = time.monotonic() + 30
  while (folder / "run.lock").read_bytes() == before and time.monotonic() < deadline:
    time.sleep(0.1)
  assert (folder / "run.lock").read_bytes() != before, "it is renewed again"
  assert not lost.is_set() and said == []
  lock.release()
