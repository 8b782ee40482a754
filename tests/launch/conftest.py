"""Requests of every launcher, and supervisors over children that are a few lines of Python."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Rows for as many devices as the tests ask for.
TRAINING = ("--config", str(ROOT / "configs" / "nano.py"), "--config.data.batch_rows=64")
PATIENCE = 20  # seconds, on a busy machine

# What a child does, in order: one word per start, the last one for all further starts.
CHILD = """
import os, pathlib, signal, sys, time
folder, plan = pathlib.Path(sys.argv[1]), sys.argv[2].split()
starts = folder / f"starts-{sys.argv[3]}"
with open(starts, "a") as file:
  file.write(f"{time.monotonic()} {os.getpid()}\\n")
word = plan[min(len(starts.read_text().splitlines()), len(plan)) - 1]
step = folder / "checkpoints"
if word == "save":  # a new checkpoint, then a crash
  (step / str(len(list(step.glob("*"))) + 1)).mkdir(parents=True)
  sys.exit(9)
if word.startswith("fork-"):  # a data worker that outlives its parent
  worker = os.fork()
  if worker == 0:
    time.sleep(60)
  (folder / "worker").write_text(str(worker))
  word = word.removeprefix("fork-")
if word.startswith("late-"):
  time.sleep(0.3)
  word = word.removeprefix("late-")
if word in ("wait", "deaf"):  # until a signal, or for ever
  def heard(number, frame):
    with open(folder / f"signals-{sys.argv[3]}", "a") as file:
      file.write(f"{number}\\n")
    if word == "wait":
      sys.exit(42)
  for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, heard)
  (folder / f"ready-{sys.argv[3]}").touch()
  while True:
    time.sleep(60)
if word == "die":
  os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(word))
"""

# Without launch.local, which loads the libraries of a run and so takes a second to start.
SUPERVISOR = """
import json, os, pathlib, sys
from launch.processes import Command
from launch.supervisor import Policy, supervise
child, folder, policy, *plans = sys.argv[1:]
argv = lambda place: (sys.executable, "-SE", "-c", child, folder, plans[place], str(place))
sys.exit(supervise(
  lambda: [Command(argv(place), os.environ) for place in range(len(plans))],
  newest_checkpoint=lambda: len(list(pathlib.Path(folder).glob("checkpoints/*"))),
  report=lambda sentence: print(sentence, flush=True),
  policy=Policy(**json.loads(policy)),
))
"""


class Supervised:
  """A supervisor in a process of its own, over one child per plan."""

  def __init__(self, folder, *plans, inside=(), **policy):
    self.folder = folder
    quick = {"first_pause": 0.01, "settle_seconds": 0.3, "stop_seconds": 5.0}
    self._output = open(folder / "output", "w+")  # noqa: SIM115, closed with the process
    self.process = subprocess.Popen(
      [
        *inside,
        sys.executable,
        "-c",
        SUPERVISOR,
        CHILD,
        str(folder),
        json.dumps(quick | policy),
        *plans,
      ],
      cwd=ROOT,
      stdout=self._output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )

  def finish(self):
    code = self.process.wait(PATIENCE)
    self._output.close()
    return code

  @property
  def output(self):
    return (self.folder / "output").read_text()

  def starts(self, place=0):
    """(time, process id) of every start of a child."""
    lines = (self.folder / f"starts-{place}").read_text().splitlines()
    return [(float(line.split()[0]), int(line.split()[1])) for line in lines]

  def signals(self, place=0):
    path = self.folder / f"signals-{place}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []

  def wait_for(self, *names):
    deadline = time.monotonic() + PATIENCE
    while not all((self.folder / name).exists() for name in names):
      assert time.monotonic() < deadline, self.output
      time.sleep(0.01)

  def end(self):
    """Whatever a failed test left."""
    if self.process.poll() is None:
      self.process.send_signal(signal.SIGTERM)
      self.process.send_signal(signal.SIGINT)
      self.finish()


@pytest.fixture
def supervise(tmp_path):
  started = []

  def start(*plans, **options):
    started.append(Supervised(tmp_path, *plans, **options))
    return started[-1]

  yield start
  for one in started:
    one.end()


def alive(pid):
  """Whether a process exists and is not only waiting to be reaped."""
  try:
    return "\nState:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
  except FileNotFoundError:
    return False


def arguments(*words, workdir="/shared/nano-1"):
  return [*TRAINING, "--workdir", workdir, *words]


def without_tools(monkeypatch, folder):
  """A machine on which no program of any cluster is installed."""
  monkeypatch.setenv("PATH", str(folder))
  assert os.environ["PATH"] == str(folder)
