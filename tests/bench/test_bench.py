"""Every benchmark runs at tiny sizes on a CPU and says what it measured. Nothing here is timed."""

import json

import jax.numpy as jnp
import pytest

from tests.bench import case, measure
from tests.bench.__main__ import main
from tests.thinned import rest_slow

MEASURED = {
  "seconds", "tflops_per_second", "fraction_of_matrix_peak", "fraction_of_bandwidth_floor",
  "argument_bytes", "output_bytes", "temporary_bytes", "device_peak_bytes", "errors",
}  # fmt: skip
WHAT = {
  "attention": {"plan", "forward", "backward", "forward+backward", "layer"},
  "indexer": {"select", "select in pool", "divergence forward+backward"},
  "experts": {"forward", "forward+backward"},
  "loss": {"forward", "forward+backward"},
}


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch):
  monkeypatch.setattr(measure, "_CALLS", 1)
  monkeypatch.setattr(measure, "_BATCHES", 1)


def document_of(folder, *arguments):
  path = folder / "bench.json"
  status = main([*arguments, "--sizes", "tiny", "--tokens", "32", "--json", str(path)])
  return status, json.loads(path.read_text())


@pytest.mark.parametrize("benchmark", rest_slow(sorted(WHAT, reverse=True), 1))
def test_a_benchmark_records_every_case_with_small_errors(benchmark, tmp_path):
  status, document = document_of(tmp_path, benchmark, "--ratio", "2", "--selection", "clustered")
  assert status == 0
  assert document["device"] == "cpu" and document["date"] and document["peaks"]
  assert {record["what"] for record in document["records"]} == WHAT[benchmark]
  for record in document["records"]:
    if record["what"] == "layer":
      assert record["total_bytes"] > 0
    else:
      assert set(record) >= MEASURED
      assert all(error < 2e-2 for error in record["errors"].values()), record


def test_a_case_that_fails_leaves_a_record_and_the_others_run():
  def refuses(x):
    raise NotImplementedError("not on this device")

  def fails(x):
    raise ValueError("first line\nsecond line")

  arguments = lambda: (jnp.ones(3),)
  cases = [case.Case({"tokens": 3}, "xla", "x", run, arguments, 1.0) for run in (refuses, fails)]
  cases.append(case.Case({"tokens": 3}, "xla", "x", lambda x: x + 1, arguments, 1.0))
  refused, failed, ran = case.records("none", cases, measure.Peaks(1.0, 1.0))
  assert refused["refused"] == "NotImplementedError: not on this device"
  assert failed["error"] == "ValueError: first line"
  assert ran["seconds"] > 0


def test_an_implementation_that_is_not_there_is_an_error_in_the_document(tmp_path):
  status, document = document_of(tmp_path, "experts", "--implementation", "magic")
  assert status == 1
  assert "'magic'" in document["records"][0]["error"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--tokens", "0"], "'0' is not one of 1, 2, ..."),
    (["--tokens", "64,abc"], "'abc' is not one of 1, 2, ..."),
    (["--ratio", "-1"], "'-1' is not one of 1, 2, ..."),
    (["--tokens", "32", "--ratio", "64"], "--tokens 32 has no entry at --ratio 64"),
    (["--selection", "foo"], "'foo' is not one of random, clustered"),
    (["--repeat", "0"], "'0' is not one of 1, 2, ..."),
    (["--json", "/proc/bench.json"], "/proc/bench.json cannot be written"),
  ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_measured(
  arguments, message, capsys
):
  with pytest.raises(SystemExit) as stopped:
    main(["attention", *arguments])
  assert stopped.value.code == 2
  assert message in capsys.readouterr().err
