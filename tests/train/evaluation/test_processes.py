"""Two processes that share the devices of a mesh evaluate and write as one does."""

import json

import numpy as np
import pytest

from tests.train.evaluation.conftest import write_run
from tests.train.several import MODEL, run
from train.errors import Exit

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small(prepared, tmp_path_factory):
  """A run of the smallest model that processes can share."""
  write_run(folder := tmp_path_factory.mktemp("small"), prepared, **MODEL)
  return folder


def evaluated(small, folder, count, *words):
  """Results and what is printed, of processes with a file of results each."""
  command = ["-m", "train", "evaluate", f"--checkpoint={small}", *words]
  codes, outputs = run(folder, count, command)
  assert codes == [Exit.DONE] * count, outputs
  return outputs


def test_two_processes_measure_what_one_does(small, tmp_path):
  tasks = "perplexity,experts,early_exit"
  results = {}
  for count in (1, 2):
    words = ["--mesh=fsdp=2,expert=2", "--limit=4", "--rows=4", f"--tasks={tasks}"]
    words += [f"--output={tmp_path}/{count}.json", f"--log-samples={tmp_path}/{count}.jsonl"]
    outputs = evaluated(small, tmp_path / str(count), count, *words)
    (record,) = json.loads((tmp_path / f"{count}.json").read_text())
    results[count] = record["results"]
    assert any("bits_per_byte" in line for line in outputs[0])
    assert not any("bits_per_byte" in line for line in outputs[-1]) or count == 1
  assert results[2].keys() == results[1].keys() == set(tasks.split(","))
  for task, metrics in results[1].items():
    for name, value in metrics.items():
      known = [n for n, x in enumerate(np.ravel(value)) if x is not None]  # a bucket may be empty
      found, want = (np.ravel(x)[known].astype(float) for x in (results[2][task][name], value))
      np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6, err_msg=f"{task} {name}")
  samples = [(tmp_path / f"{count}.jsonl").read_text().splitlines() for count in (1, 2)]
  assert len(samples[0]) == len(samples[1]) > 4


def test_two_processes_write_one_text(small, tmp_path):
  texts = []
  for count in (1, 2):
    command = ["-m", "train", "generate", f"--checkpoint={small}", "--mesh=fsdp=4"]
    command += ["--prompt=expert router", "--max-new-tokens=6", "--samples=4", "--seed=3"]
    codes, outputs = run(tmp_path / str(count), count, command)
    assert codes == [Exit.DONE] * count, outputs
    texts.append(outputs[0])
    assert count == 1 or not any("--- 0" in line for line in outputs[1])
  assert texts[0] == texts[1] and "--- 3" in texts[0]


def test_what_stops_one_process_stops_all_with_one_sentence(small, tmp_path):
  words = ["--tasks=perplexity", "--watch", "--mesh=fsdp=2"]
  command = ["-m", "train", "evaluate", f"--checkpoint={small}", *words]
  codes, outputs = run(tmp_path / "run", 2, command)
  assert codes == [Exit.USAGE] * 2
  assert [line for line in outputs[0] if line.startswith("--")] == [
    "--mesh has 2 devices; 2 processes need one of all 4.",
    "--watch is for one process, there are 2.",
  ]
  assert outputs[1] == []
