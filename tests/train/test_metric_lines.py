"""Metrics of a run in a store: segments that together are the one file of a local run."""

import json

import pytest

from deepseek_jax.storage_path import storage_path
from train import metric_lines
from train.metric_lines import LineSegments, read
from train.metrics import MetricsWriter


@pytest.fixture
def folder(s3):
  return storage_path(f"{s3}/run")


def line(step, **values):
  return json.dumps({"step": step, **values}).encode() + b"\n"


def segments(folder):
  """Steps by segment."""
  return {
    name: [json.loads(text)["step"] for text in (folder / name).read_text().splitlines()]
    for name in folder.names_below("metrics-")
  }


def steps(folder):
  return [found["step"] for found in read(folder)]


def test_a_segment_ends_where_it_is_flushed_and_at_the_end(folder):
  lines = LineSegments(folder, 0)
  for step in range(1, 6):
    lines.write(line(step))
    if step == 3:
      lines.flush()
  lines.flush()
  lines.flush()
  lines.close()
  assert segments(folder) == {"metrics-000001.jsonl": [1, 2, 3], "metrics-000002.jsonl": [4, 5]}


def test_a_segment_ends_after_so_many_lines(folder, monkeypatch):
  monkeypatch.setattr(metric_lines, "SEGMENT_LINES", 4)
  lines = LineSegments(folder, 0)
  for step in range(1, 11):
    lines.write(line(step))
    if lines._writing:
      lines._writing.result()
  lines.close()
  assert [len(found) for found in segments(folder).values()] == [4, 4, 2]
  assert steps(folder) == list(range(1, 11))


def test_a_segment_ends_after_so_much_time(folder, monkeypatch):
  monkeypatch.setattr(metric_lines, "SEGMENT_SECONDS", 0.0)
  lines = LineSegments(folder, 0)
  for step in (1, 2, 3):
    lines.write(line(step))
    lines._writing.result()
  assert steps(folder) == [1, 2, 3], "without a flush"
  lines.close()


@pytest.mark.parametrize("resumed", range(8))
def test_a_resumed_run_cuts_later_steps_wherever_its_checkpoint_is(folder, resumed):
  lines = LineSegments(folder, 0)
  for step in range(1, 8):
    lines.write(line(step, run=1))
    if step in (2, 5):
      lines.flush()
  lines.close()
  again = LineSegments(folder, resumed)
  for step in range(resumed + 1, 9):
    again.write(line(step, run=2))
  again.close()
  assert steps(folder) == list(range(1, 9))
  assert [found["run"] for found in read(folder)] == [1] * resumed + [2] * (8 - resumed)


def test_lines_wait_for_a_store_that_is_away_and_arrive_once(folder, monkeypatch, s3_server):
  lines = LineSegments(folder, 0)
  monkeypatch.setattr(metric_lines, "SEGMENT_LINES", 2)
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  lines.write(line(1))
  lines.write(line(2))
  with pytest.raises(OSError, match="cannot be reached"):
    lines._writing.result()
  monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
  lines.write(line(3))
  lines.close()
  assert steps(folder) == [1, 2, 3]


def test_a_flush_that_fails_says_so(folder, monkeypatch):
  lines = LineSegments(folder, 0)
  lines.write(line(1))
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  with pytest.raises(OSError, match="cannot be reached"):
    lines.flush()


def test_the_writer_flushes_lines_and_events_together(folder):
  with MetricsWriter(folder, resume_step=0, total_steps=2, log_every=1) as writer:
    writer.write(1, {"loss": 2.0})
    writer.flush()
    assert read(folder) == [{"step": 1, "loss": 2.0}]
    writer.write(2, {"loss": 1.0})
  assert steps(folder) == [1, 2]
  (events,) = folder.names_below("events")
  assert b"loss" in (folder / events).read_bytes()
