"""metrics.jsonl: valid JSON, one line per step whatever happened, nothing lost by SIGKILL."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboardX.proto import event_pb2

from train.metric_lines import cut_after
from train.metrics import MetricsWriter
from train.progress import Progress

ROOT = pathlib.Path(__file__).parents[2]


def quiet(first_step=0, total_steps=10, log_every=5):
  console = rich.console.Console(file=io.StringIO(), soft_wrap=True)
  progress = Progress(
    first_step=first_step, total_steps=total_steps, log_every=log_every, console=console
  )
  return console.file, progress


def write(folder, steps, resume_step=0, **values):
  _, progress = quiet(resume_step)
  with MetricsWriter(
    folder, resume_step=resume_step, total_steps=10, log_every=5, progress=progress
  ) as writer:
    for step in steps:
      writer.write(step, {"loss": step / 2, **values})


def lines(folder):
  def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")

  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_resumed_run_has_one_line_per_step(tmp_path):
  write(tmp_path, range(1, 8), attempt=1)
  write(tmp_path, range(5, 11), resume_step=4, attempt=2)
  found = lines(tmp_path)
  assert [line["step"] for line in found] == list(range(1, 11))
  assert [line["attempt"] for line in found] == [1] * 4 + [2] * 6


def test_what_was_measured_before_training_stays_and_is_not_there_twice(tmp_path):
  for attempt, (steps, resume_step) in enumerate([((0, 1), 0), ((0, 1, 2), 0), ((2, 3), 1)]):
    write(tmp_path, steps, resume_step, attempt=attempt)
  assert [(line["step"], line["attempt"]) for line in lines(tmp_path)] == [
    (0, 1),
    (1, 1),
    (2, 2),
    (3, 2),
  ]


def test_a_run_that_starts_afresh_starts_the_file_afresh(tmp_path):
  write(tmp_path, range(1, 4))
  write(tmp_path, range(1, 3))
  assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b'{"step": 3}', b"\n", b'{"loss": 1}\n'])
def test_what_is_no_complete_line_is_removed(tmp_path, torn):
  write(tmp_path, [1, 2])
  path = tmp_path / "metrics.jsonl"
  whole = path.read_bytes()
  path.write_bytes(whole + torn)
  cut_after(path, 9)
  assert path.read_bytes() == whole


def test_nan_and_infinity_are_null_and_arrays_are_numbers(tmp_path):
  write(
    tmp_path,
    [1],
    grad_norm=float("nan"),
    mfu=jnp.float32(np.inf),
    lr=jnp.float32(0.1),
    load=np.asarray([1.0, np.nan]),
    skipped=np.int64(2),
    records=["a", "b"],
  )
  assert lines(tmp_path) == [
    {
      "step": 1,
      "loss": 0.5,
      "grad_norm": None,
      "mfu": None,
      "lr": float(np.float32(0.1)),
      "load": [1.0, None],
      "skipped": 2,
      "records": ["a", "b"],
    }
  ]


def test_a_step_is_never_written_twice(tmp_path):
  with pytest.raises(ValueError, match="step 2 was written already"):
    write(tmp_path, [1, 2, 2])
  assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def events(path):
  """The events of a TensorBoard file: length (8 bytes), checksum (4), event, checksum (4)."""
  content, at = path.read_bytes(), 0
  while at < len(content):
    size = int.from_bytes(content[at : at + 8], "little")
    yield event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
    at += 16 + size


def test_tensorboard_shows_the_steps_of_the_continued_run(tmp_path):
  for number, (steps, resume_step) in enumerate([(range(1, 8), 0), (range(5, 11), 4)]):
    (tmp_path / str(number)).mkdir()
    write(tmp_path / str(number), steps, resume_step, attempt=number, loss=float("nan"))
  found = {}
  for number in (0, 1):
    (path,) = (tmp_path / str(number)).glob("events.*")
    for event in events(path):
      if event.session_log.status == event_pb2.SessionLog.START:  # TensorBoard drops these steps
        found = {step: value for step, value in found.items() if step < event.step}
      for value in event.summary.value:
        found[event.step] = value.simple_value
  assert found == {step: 0.0 if step <= 4 else 1.0 for step in range(1, 11)}


def test_without_a_terminal_there_is_one_line_per_interval_and_per_validation():
  file, progress = quiet(total_steps=12)
  for step in range(1, 13):
    extra = {"validation_bits_per_byte": 2.25} if step == 7 else {}
    progress.step(step, {"loss": None, "tokens_per_second": 1234.5, **extra})
  progress.close()
  shown = file.getvalue().splitlines()
  assert [line.split("  ")[0] for line in shown] == [f"step {n}/12" for n in (5, 7, 10, 12)]
  assert "loss nan" in shown[0] and "1,234 tokens/s" in shown[0] and shown[0].endswith(" left")
  assert "validation 2.2500 bits/byte" in shown[1]


def test_before_the_first_step_nothing_is_said_about_the_time_left():
  file, progress = quiet(total_steps=12)
  progress.step(0, {"validation_bits_per_byte": 2.25})
  progress.close()
  assert file.getvalue() == "step 0/12  validation 2.2500 bits/byte\n"


def test_on_a_terminal_there_is_one_bar():
  console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100)
  progress = Progress(first_step=2, total_steps=4, log_every=1, console=console)
  progress.step(3, {"loss": 1.5, "tokens_per_second": 10.0})
  progress.close()
  text = console.file.getvalue()
  assert "3/4" in text and "loss 1.5000" in text and "step 3/4" not in text


WRITER = """
import sys
from train.metrics import MetricsWriter
writer = MetricsWriter(sys.argv[1], resume_step=0, total_steps=10**9, log_every=10**9)
for step in range(1, 10**9):
  writer.write(step, {"loss": 1.0 / step})
"""


def test_after_sigkill_every_line_is_whole(tmp_path):
  with open(tmp_path / "output", "w") as output:
    process = subprocess.Popen(
      [sys.executable, "-c", WRITER, str(tmp_path)],
      cwd=ROOT,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  path, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 30
  while not (path.exists() and path.stat().st_size > 10_000):
    assert time.monotonic() < deadline, (tmp_path / "output").read_text()
    time.sleep(0.01)
  os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  last = len(path.read_bytes().splitlines())
  write(tmp_path, [last - 1], resume_step=last - 2)
  assert [line["step"] for line in lines(tmp_path)] == list(range(1, last))


_FULL_DISK = """
import pathlib, resource, signal, sys
from train.metrics import MetricsWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
  with MetricsWriter(
    pathlib.Path(sys.argv[1]), resume_step=0, total_steps=5000, log_every=5000
  ) as writer:
    for step in range(1, 5001):
      writer.write(step, {"loss": 1.0, "tokens": step})
except OSError:
  sys.exit(7)
"""


def test_a_full_disk_is_an_error_and_not_a_run_that_waits_for_ever(tmp_path):
  root = pathlib.Path(__file__).parents[2]
  command = [sys.executable, "-c", _FULL_DISK, str(tmp_path)]
  done = subprocess.run(command, cwd=root, capture_output=True, timeout=60, check=False)
  assert done.returncode == 7, done.stderr.decode()
