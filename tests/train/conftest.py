"""Runs of the smallest configuration on a little text, in this process or in one of their own."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from data.prepare.run import PrepareRequest, prepare
from deepseek_jax.storage_path import RemotePath
from tests.conftest import QUICK_XLA
from train import convert, metric_lines, settings
from train.errors import Exit

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests" / "reference"
SLOTS, VOCAB = 64, 300
TIMING = ("tokens_per_second", "step_seconds", "data_wait_seconds", "mfu")
PATIENCE = 300  # seconds for a process that compiles on a busy machine


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
  """Documents of words that follow one another by a rule; a quarter of them is held out."""
  text = tmp_path_factory.mktemp("text")
  words = ["expert", "router", "stream", "entry", "window", "query", "layer", "token", "slot"]
  for number in range(16):
    chosen = [words[(number + 3 * i * i + i // 7) % len(words)] for i in range(400)]
    (text / f"{number}.txt").write_text(" ".join(chosen))
  request = PrepareRequest(
    source=f"folder:{text}", tokenizer=f"train:{VOCAB}", slots=SLOTS, validation_share=0.25
  )
  return prepare(request, tmp_path_factory.mktemp("prepared"))


def prepare_with_marks(prepared, folder):
  """The same text, with a tokenizer that has the marks of chats."""
  request = PrepareRequest(
    source=prepared.request["source"],
    tokenizer=f"train:{VOCAB}",
    chat_tokens=True,
    slots=SLOTS,
    validation_share=0.25,
  )
  return prepare(request, folder)


@pytest.fixture
def damaged(prepared, tmp_path):
  """A copy of the prepared folder with a flipped byte among the records of its first shard."""
  folder = shutil.copytree(prepared.folder, tmp_path / "data")
  shard = folder / prepared.train.shards[0].name
  content = bytearray(shard.read_bytes())
  used = np.flatnonzero(np.frombuffer(bytes(content[: 1 << 16]), np.uint8))  # zeros fill the block
  content[int(used[-1]) // 2] ^= 0xFF
  shard.write_bytes(content)
  return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
  """A reference case as a released checkpoint ("case"), what it becomes on eight devices ("run")
  and what that becomes ("released")."""
  folder = tmp_path_factory.mktemp("converted")
  shutil.copytree(
    REFERENCE / "quantized_model",
    folder / "case",
    ignore=shutil.ignore_patterns("outputs*", "*.md", "compressed_map.json"),
  )
  go = lambda source, target, *words: convert.main(
    ["--checkpoint", str(folder / source), "--output", str(folder / target), *words]
  )
  mesh = ("--config.mesh.fsdp=4", "--config.mesh.expert=2")
  assert go("case", "run", "--format", "checkpoint", *mesh) == Exit.DONE
  assert go("run", "released", "--format", "released", "--dtype", "released") == Exit.DONE
  assert sorted(path.name for path in folder.iterdir()) == ["case", "released", "run"]
  return folder


@pytest.fixture(scope="session")
def runs(prepared):
  return Runs(prepared.folder)


@pytest.fixture(scope="session")
def one_device():
  return jax.devices()[:1]


class Runs:
  """Starts runs and reads what they left; keywords are configuration keys with __ for the dot."""

  def __init__(self, data: pathlib.Path, verb: str = settings.PRETRAIN):
    self.data, self.verb = data, verb

  def argv(self, workdir, **changes):
    fixed = {"data.paths": self.data, "model.vocab": VOCAB, "model.engram.compressed_vocab": VOCAB}
    given = {name.replace("__", "."): value for name, value in changes.items()}
    words = [f"--config.{name}={value}" for name, value in (fixed | given).items()]
    return [f"--config={ROOT}/configs/nano.py", f"--workdir={workdir}", *words]

  def command(self, workdir, *, devices=1, **changes):
    return settings.parse(self.argv(workdir, **changes), devices=devices, verb=self.verb)

  def start(self, workdir, *words, inside=(), **changes):
    """A process on one device, in a group of its own, started by the command `inside`."""
    flags = f"--xla_force_host_platform_device_count=1 {QUICK_XLA}"
    environment = dict(os.environ, XLA_FLAGS=flags)
    with open(self._output(workdir), "w") as output:
      return subprocess.Popen(
        [
          *inside,
          sys.executable,
          "-m",
          "train",
          self.verb,
          *self.argv(workdir, **changes),
          *words,
        ],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  def finish(self, workdir, *words, **options):
    """Exit code and output of a process that runs to its end."""
    code = self.start(workdir, *words, **options).wait(PATIENCE)
    return code, self.output(workdir)

  def output(self, workdir):
    return self._output(workdir).read_text()

  def lines(self, workdir):
    """The lines of the metrics, without what a clock decides."""
    found = metric_lines.read(workdir)
    return [{k: v for k, v in line.items() if k not in TIMING} for line in found]

  def wait_for_step(self, workdir, step, process):
    """Returns as soon as the step has its line; that of step 0 is one more."""
    deadline = time.monotonic() + PATIENCE
    path = workdir / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < step + (self.verb == settings.SFT):
      assert process.poll() is None, self.output(workdir)
      assert time.monotonic() < deadline
      time.sleep(0.002)

  def _output(self, workdir):
    if isinstance(workdir, RemotePath):
      return self.data.with_name(f"{workdir.bucket}-{workdir.name}.output")
    return workdir.with_name(f"{workdir.name}.output")
