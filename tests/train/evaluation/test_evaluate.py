"""`python -m train evaluate` from end to end, on runs with random weights."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from data.pipeline import open_validation, validation_split
from deepseek_jax.checkpoint import Checkpoints
from tests.conftest import QUICK_XLA
from tests.train.conftest import PATIENCE, ROOT, VOCAB
from tests.train.evaluation.conftest import STEPS, add_step, opened, request
from tests.train.spoil import change_model, damage
from train.__main__ import main
from train.errors import Exit
from train.evaluation import perplexity
from train.evaluation.tasks import find_tasks
from train.programs import loss_sums

CHOICES = [
  {"context": "expert router", "choices": [" stream", " xyz", " entry window"], "answer": n % 3}
  for n in range(4)
]


def evaluate(folder, *words):
  return main(["evaluate", "--checkpoint", str(folder), "--rows=2", *words])


def records(path):
  return json.loads(path.read_text())


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
  path = tmp_path_factory.mktemp("choices") / "choices.jsonl"
  path.write_text("".join(json.dumps(problem) + "\n" for problem in CHOICES))
  return path


@pytest.mark.slow
def test_perplexity_is_what_training_measures(model, prepared):
  """The same sums as those of a run's validation, over the whole validation part."""
  task = find_tasks(request("run"))[0]
  log = []
  measured = task.run(model, request("run"), log.append)
  data = dataclasses.replace(model.settings.data, batch_rows=2)
  sums = jax.jit(loss_sums(dataclasses.replace(model.settings, model=model.cfg)))
  nats, targets = 0.0, 0.0
  engram, variables = model.cfg.engram, model.variables
  for batch in open_validation(data, ratios=model.cfg.ratios, engram=engram):
    more = sums(variables["params"], variables["balance"], batch.layout)
    nats, targets = nats + float(more[0]), targets + float(more[1])
  split = validation_split(data)
  expected = split.bits_per_byte(nats / targets)
  assert measured["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
  assert (measured["tokens"], measured["bytes"]) == (split.targets, split.bytes)
  assert measured["nats_per_token"] == pytest.approx(nats / targets, rel=1e-5)
  assert set(task.metrics) <= set(measured)
  assert_parts_add_up(measured, log, prepared)


def assert_parts_add_up(measured, log, prepared):
  assert measured[f"bits_per_byte_of_{prepared.folder.name}"] == measured["bits_per_byte"]
  buckets = [name for name in measured if "_after_" in name]
  assert (
    buckets
    == [f"bits_per_byte_after_{span}" for span in ("0_to_15", "16_to_63", "64_to_255")][
      : len(buckets)
    ]
  )
  assert len(log) == prepared.validation.rows
  assert sum(row["tokens"] for row in log) == measured["tokens"]
  nats = sum(row["nats"] for row in log)
  assert nats / math.log(2) / measured["bytes"] == pytest.approx(measured["bits_per_byte"])


@pytest.mark.slow
def test_perplexity_of_fewer_rows_does_not_depend_on_rows_at_a_time(model):
  three = [
    perplexity.make("perplexity", "", None).run(
      dataclasses.replace(model, rows=rows), request("run", "--limit=3"), lambda sample: None
    )
    for rows in (2, 5)
  ]
  assert three[0]["tokens"] == three[1]["tokens"] <= 3 * 64
  assert three[0]["bits_per_byte"] == pytest.approx(three[1]["bits_per_byte"], rel=1e-5)


def test_buckets_have_borders_that_grow():
  numbers = perplexity._bucket(np.array([0, 1, 15, 16, 63, 64, 255, 256, 1023, 1024]))
  assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
  assert [perplexity._bucket_name(n) for n in (0, 1, 2)] == [
    "_after_0_to_15",
    "_after_16_to_63",
    "_after_64_to_255",
  ]


@pytest.fixture(scope="module")
def evaluated(trained, choices, tmp_path_factory):
  """results.json and samples.jsonl of both steps, with the first three choices."""
  folder = tmp_path_factory.mktemp("first")
  words = [f"--tasks=multiple_choice:{choices}", "--step=all", "--limit=3"]
  words += [f"--output={folder}/results.json", f"--log-samples={folder}/samples.jsonl"]
  assert evaluate(trained, *words) == Exit.DONE
  return folder


@pytest.fixture
def kept(evaluated, tmp_path):
  """A copy of them, and what to evaluate again."""
  shutil.copytree(evaluated, tmp_path / "kept")
  return tmp_path / "kept" / "results.json", f"--output={tmp_path}/kept/results.json"


def test_a_record_says_what_was_measured_and_how(evaluated, choices):
  task, found = f"multiple_choice:{choices}", records(evaluated / "results.json")
  assert [record["step"] for record in found] == list(STEPS)
  assert len({record["checkpoint_sha256"] for record in found}) == 2
  for record in found:
    assert record["config"]["model"]["vocab"] == VOCAB and record["versions"]["jax"]
    assert record["settings"]["limit"] == 3 and record["settings"]["seed"] == 0
    assert record["results"][task]["problems"] == 3.0 and len(record["sources"][task]) == 64
  assert [line["step"] for line in lines(evaluated / "samples.jsonl")] == [3] * 3 + [7] * 3


def test_what_a_file_has_is_not_computed_again(kept, trained, choices, tmp_path, capsys):
  output, word = kept
  before, task = records(output), f"multiple_choice:{choices}"
  samples = output.with_name("samples.jsonl")
  logged = samples.read_bytes()
  words = [f"--tasks={task},perplexity", "--step=all", "--limit=3", f"--log-samples={samples}"]
  assert evaluate(trained, *words, word) == Exit.DONE
  after = records(output)
  assert [record["results"].pop("perplexity").keys() >= {"top1"} for record in after] == [True] * 2
  assert after == before
  assert samples.read_bytes().startswith(logged) and len(lines(samples)) > 6
  said = capsys.readouterr().out
  assert said.count(f"is in {output} already.") == 2
  assert all(f"run, step {step}" in said for step in STEPS) and "bits_per_byte" in said


def test_a_choice_is_judged_by_its_likelihood(model, choices):
  log = []
  task = find_tasks(request("run", f"--tasks=multiple_choice:{choices}"))[0]
  measured = task.run(model, request("run"), log.append)
  chosen = log[0]["chosen"]
  assert chosen == int(np.argmax(log[0]["log_likelihoods"]))
  assert measured["accuracy"] == np.mean([sample["answer"] == chosen for sample in log])
  sizes = [len(choice) for choice in CHOICES[0]["choices"]]
  per_byte = np.argmax(np.array(log[0]["log_likelihoods"]) / sizes)
  assert log[0]["chosen_per_byte"] == per_byte


def test_conditions_decide_the_exit_code(kept, trained, choices, capsys):
  _, word = kept
  task = f"multiple_choice:{choices}"
  words = [f"--tasks={task}", "--limit=3", word]
  assert evaluate(trained, *words, "--fail-if=accuracy > 1") == Exit.DONE
  conditions = ["--fail-if=accuracy>1", "--fail-if", f"{task}.problems <= 3"]
  assert evaluate(trained, *words, *conditions) == Exit.CHECK_FAILED
  (sentence,) = [line for line in capsys.readouterr().out.splitlines() if "holds" in line]
  assert sentence == f"{task}.problems is 3: --fail-if {task}.problems <= 3 holds."


@pytest.mark.parametrize(
  ("words", "sentence"),
  [
    (["--limit=1"], "limit was 3 and is now 1."),
    (["--limit=3", "--seed=1", "--cache=plain"], "cache was packed and is now plain."),
  ],
)
def test_results_of_other_settings_are_refused_and_stay(words, sentence, kept, trained, capsys):
  output, word = kept
  before = output.read_bytes()
  assert evaluate(trained, "--tasks=perplexity", word, *words) == Exit.USAGE
  error = capsys.readouterr().err.splitlines()
  assert f"{output}: {sentence}" in error
  assert error[-1] == "Name another --output; this one is left as it is."
  assert output.read_bytes() == before


def test_results_of_a_file_that_has_changed_are_refused(kept, trained, choices, capsys):
  _, word = kept
  text = choices.read_text()
  choices.write_text(text.replace("xyz", "abc"))
  words = [f"--tasks=multiple_choice:{choices}", "--limit=3", word]
  assert evaluate(trained, *words) == Exit.USAGE
  choices.write_text(text)
  assert "that are of another file" in capsys.readouterr().err


def other_tokenizer(folder):
  """A copy of the data, which says that its tokenizer is another one."""
  config = json.loads((folder / "config.json").read_text())
  data = shutil.copytree(config["data"]["paths"][0], folder / "data")
  metadata = json.loads((data / "metadata.json").read_text())
  (data / "metadata.json").write_text(json.dumps(metadata | {"tokenizer_sha256": "0"}))
  (folder / "config.json").write_text(
    json.dumps(config | {"data": config["data"] | {"paths": [str(data)]}})
  )


@pytest.mark.parametrize(
  ("change", "words", "sentence"),
  [
    (lambda f: shutil.rmtree(f / "checkpoints"), (), "is no run folder with a complete step"),
    (lambda f: (f / "config.json").write_text("{"), (), "is no configuration of a run"),
    (lambda f: (f / "config.json").unlink(), (), "cannot be read: No such file"),
    (lambda f: None, ("--step=4",), "--step is 4, the complete checkpoints of"),
    (lambda f: None, ("--data=nowhere",), "There is no tokenizer: nowhere is no folder"),
    (damage, (), "cannot be used"),
    (lambda f: change_model(f, dim=64), (), "does not fit its config.json"),
    (other_tokenizer, (), "was trained with another tokenizer than that in"),
  ],
)
def test_a_checkpoint_or_data_that_do_not_fit_are_one_sentence(
  change, words, sentence, trained, tmp_path, capsys
):
  folder = shutil.copytree(trained, tmp_path / "run")
  change(folder)
  assert evaluate(folder, "--tasks=perplexity", *words) == Exit.USAGE
  error = capsys.readouterr().err
  assert sentence in error
  assert "Traceback" not in error


def test_a_step_itself_may_be_named(trained, capsys):
  folder = trained / "checkpoints" / "3"
  assert evaluate(folder, "--tasks=perplexity", "--limit=1") == Exit.DONE
  assert "run, step 3" in capsys.readouterr().out
  assert evaluate(folder, "--tasks=perplexity", "--step=3") == Exit.USAGE
  assert "is one checkpoint and no run" in capsys.readouterr().err


@pytest.mark.slow
def test_answers_that_are_written_match(trained, tmp_path, capsys):
  model = opened(trained, "--rows=2")
  text = model.generate([model.encode("router")], 6)[0]
  file, samples = tmp_path / "match.jsonl", tmp_path / "samples.jsonl"
  problems = [
    {
      "prompt": "router",
      "answer": ["nothing", text],
      "stop": ["no such text"],
      "max_new_tokens": 6,
    },
    {"prompt": "router", "answer": text + "?", "stop": ["no such text"], "max_new_tokens": 6},
    {"prompt": "entry", "answer": "never"},
  ]
  file.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
  task, output = f"exact_match:{file}", tmp_path / "r.json"
  words = [f"--tasks={task}", f"--log-samples={samples}", f"--output={output}"]
  assert evaluate(trained, *words, f"--fail-if={task}.exact_match<0.3") == Exit.DONE
  assert records(output)[0]["results"][task]["exact_match"] == pytest.approx(1 / 3)
  assert [line["right"] for line in lines(samples)] == [True, False, False]


@pytest.mark.slow
def test_programs_run_only_when_told_to(trained, tmp_path, capsys):
  file, samples = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
  problem = {"task_id": "T/0", "prompt": "def one():\n", "canonical_solution": "  return 1\n"}
  problem |= {"entry_point": "one", "test": "def check(f):\n  assert f() == 1\n"}
  file.write_text(json.dumps(problem) + "\n")
  words = [f"--tasks=humaneval:{file}", f"--log-samples={samples}"]
  assert evaluate(trained, *words) == Exit.DONE
  assert all(line["programs"] == [] for line in lines(samples))
  assert evaluate(trained, *words, "--fail-if=pass@1>0") == Exit.USAGE
  assert "is no metric of these tasks" in capsys.readouterr().err
  assert evaluate(trained, *words, "--execute", "--fail-if=pass@1>0") == Exit.DONE
  (line,) = lines(samples)  # random weights write no program
  assert len(line["programs"]) == len(line["outcomes"]) == 1 and line["outcomes"] != ["passed"]


class Process:
  """An evaluation of its own."""

  def __init__(self, folder, *words):
    flags = f"--xla_force_host_platform_device_count=1 {QUICK_XLA}"
    self.output = folder.with_name(f"{folder.name}.{time.monotonic_ns()}.output")
    with open(self.output, "w") as output:
      command = [sys.executable, "-m", "train", "evaluate", f"--checkpoint={folder}", "--rows=2"]
      self.process = subprocess.Popen(
        [*command, *words],
        cwd=ROOT,
        env=dict(os.environ, XLA_FLAGS=flags),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  def wait_for(self, condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
      assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
      time.sleep(0.01)


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_with_the_next_task(trained, choices, tmp_path):
  folder, output = shutil.copytree(trained, tmp_path / "run"), tmp_path / "r.json"
  samples = tmp_path / "samples.jsonl"
  words = [f"--tasks=multiple_choice:{choices},perplexity", "--step=all", f"--output={output}"]
  words += [f"--log-samples={samples}"]
  killed = Process(folder, *words)
  killed.wait_for(output.exists)
  os.killpg(killed.process.pid, signal.SIGKILL)
  assert killed.process.wait(PATIENCE) == -signal.SIGKILL
  before = records(output)
  assert sum(len(record["results"]) for record in before) < 4
  finished = Process(folder, *words)
  assert finished.process.wait(PATIENCE) == Exit.DONE, finished.output.read_text()
  assert finished.output.read_text().count("already") == sum(len(r["results"]) for r in before)
  alone = tmp_path / "alone.json"
  assert evaluate(folder, *words[:2], f"--output={alone}") == Exit.DONE
  for one, other in zip(records(output), records(alone), strict=True):
    for task, metrics in one["results"].items():
      assert metrics == pytest.approx(other["results"][task], rel=1e-5, nan_ok=True)
  owners = [(line["step"], line["task"]) for line in lines(samples)]
  assert [owners.count((step, f"multiple_choice:{choices}")) for step in STEPS] == [4, 4]


@pytest.mark.slow
def test_watching_evaluates_what_appears_and_ends_with_the_last_step(
  trained, model, prepared, tmp_path
):
  folder, output = shutil.copytree(trained, tmp_path / "run"), tmp_path / "r.json"
  steps = lambda: [record["step"] for record in records(output)] if output.exists() else []
  watching = Process(folder, "--tasks=perplexity", "--limit=1", "--watch", f"--output={output}")
  watching.wait_for(lambda: steps() == [7])
  checkpoints = Checkpoints(folder / "checkpoints", keep_last=5)
  add_step(checkpoints, model.settings, model.settings.total_steps, prepared.tokenizer_sha256)
  checkpoints.close()
  assert watching.process.wait(PATIENCE) == Exit.DONE, watching.output.read_text()
  assert steps() == [7, 8]


@pytest.mark.slow
def test_watching_ends_when_it_is_told_to(trained, tmp_path):
  folder, output = shutil.copytree(trained, tmp_path / "run"), tmp_path / "r.json"
  words = ["--tasks=perplexity", "--limit=1", "--watch", "--step=all", f"--output={output}"]
  watching = Process(folder, *words, "--fail-if=bits_per_byte > 0")
  watching.wait_for(lambda: "Waiting" in watching.output.read_text())
  watching.process.send_signal(signal.SIGTERM)
  assert watching.process.wait(PATIENCE) == Exit.CHECK_FAILED
  assert [record["step"] for record in records(output)] == list(STEPS)
