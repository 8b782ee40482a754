"""SIGTERM, SIGINT, SIGHUP: the first is a request, the second or the end of the grace an order."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from train.signals import StopSignal

ROOT = pathlib.Path(__file__).parents[2]

# Ends by itself at the first signal, or is deaf: in a call that Python cannot interrupt, as a
# compilation is.
RUN = """
import ctypes, pathlib, sys, time
from train.signals import StopSignal
folder, deaf, grace = pathlib.Path(sys.argv[1]), sys.argv[2] == "deaf", float(sys.argv[3])
with StopSignal(lambda s: print(s, flush=True), grace_seconds=grace) as stop:
  (folder / "ready").touch()
  while deaf:
    ctypes.CDLL(None).sleep(5)
  while not stop.requested:
    time.sleep(0.01)
sys.exit(42)
"""


def start(folder, manner, grace=30.0):
  with open(folder / "output", "w") as output:
    process = subprocess.Popen(
      [sys.executable, "-c", RUN, str(folder), manner, str(grace)],
      cwd=ROOT,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  deadline = time.monotonic() + 60
  while not (folder / "ready").exists():
    assert time.monotonic() < deadline, (folder / "output").read_text()
    time.sleep(0.01)
  return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_is_a_request(tmp_path, number):
  process = start(tmp_path, "listening")
  process.send_signal(number)
  assert process.wait(60) == 42
  assert (tmp_path / "output").read_text().startswith(f"{number.name}: saving after this step")


@pytest.mark.parametrize(("number", "heard"), [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_of_signals_that_were_ignored_before_only_the_hang_up_stays_so(number, heard):
  before = signal.signal(number, signal.SIG_IGN)
  try:
    with StopSignal(lambda sentence: None) as stop:
      os.kill(os.getpid(), number)
      time.sleep(0.3)
      assert stop.requested == heard
  finally:
    signal.signal(number, before)


def test_the_second_signal_ends_a_process_that_cannot_listen(tmp_path):
  process = start(tmp_path, "deaf")
  process.send_signal(signal.SIGTERM)
  time.sleep(0.2)
  assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  assert process.wait(3) == 128 + signal.SIGTERM


def test_the_grace_time_ends_a_process_that_does_not_end(tmp_path):
  process = start(tmp_path, "deaf", grace=0.3)
  process.send_signal(signal.SIGTERM)
  assert process.wait(3) == 128 + signal.SIGTERM
  assert "no end within 0.3 s" in (tmp_path / "output").read_text()


def test_afterwards_signals_do_what_they_did_before():
  before = signal.getsignal(signal.SIGINT)
  with StopSignal(lambda sentence: None) as stop:
    os.kill(os.getpid(), signal.SIGINT)
    deadline = time.monotonic() + 60
    while not stop.requested:
      assert time.monotonic() < deadline
      time.sleep(0.001)
  assert signal.getsignal(signal.SIGINT) is before
  with pytest.raises(KeyboardInterrupt):
    signal.raise_signal(signal.SIGINT)
