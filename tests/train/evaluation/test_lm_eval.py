"""lm-eval on a checkpoint, with tasks of local files and no network."""

import json

import pytest

from tests.train.evaluation.conftest import request
from train.__main__ import main
from train.errors import Exit, UsageError
from train.evaluation import lm_eval_tasks, multiple_choice, tasks
from train.evaluation.model import Scored

PROBLEMS = [
  {"context": "expert router", "choices": [" stream", " entry", " slot"], "answer": 0},
  {"context": "token", "choices": [" expert", " query window"], "answer": 1},
  {"context": "entry window", "choices": [" layer", " router"], "answer": 1},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ANSWER = """
task: local_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["no such text"], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_without_the_package_a_sentence_names_the_extra(monkeypatch):
  monkeypatch.setattr(lm_eval_tasks, "PACKAGE", "no_such_package")
  with pytest.raises(UsageError) as caught:
    tasks.find_tasks(request("run", "--tasks=lm_eval:a"))
  sentence = "--tasks lm_eval:a needs lm-eval: pip install 'deepseek_jax[eval]'."
  assert caught.value.problems == (sentence,)


class Instance:
  """What lm-eval hands to a model."""

  def __init__(self, *args):
    self.args = args


@pytest.fixture(scope="module")
def adapter(model):
  pytest.importorskip("lm_eval", reason="the extra eval is not installed")
  return pytest.importorskip("train.evaluation.lm_eval_model").LmEvalModel(model)


@pytest.fixture
def offline(monkeypatch, tmp_path):
  pytest.importorskip("lm_eval", reason="the extra eval is not installed")
  monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  problems = tmp_path / "problems.jsonl"
  problems.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
  for name, text in (("choice", CHOICE), ("answer", ANSWER)):
    (tmp_path / f"{name}.yaml").write_text(text.format(file=problems))
  return tmp_path


def test_likelihoods_are_those_of_the_model(adapter, model):
  whole = model.encode("router stream")
  (expected,) = model.log_likelihoods([Scored(whole, 1)])
  pairs = [Instance("", "router stream"), Instance("router", "")]
  assert adapter.loglikelihood(pairs) == [(expected.total, False), (0.0, True)]
  texts = [Instance("router stream"), Instance("")]
  assert adapter.loglikelihood_rolling(texts) == [expected.total, 0.0]
  assert adapter.loglikelihood([]) == []


@pytest.mark.slow
def test_texts_are_those_of_the_model(adapter, model):
  prompts = ["router", "entry window"]
  greedy = {"max_gen_toks": 5, "do_sample": False, "temperature": 0.7}
  asked = [Instance(p, {"until": ["no such text"], **greedy}) for p in prompts]
  asked.append(Instance("router", {"until": "o", "max_gen_toks": 5}))
  written = adapter.generate_until(asked)
  texts = model.generate([model.encode(prompt) for prompt in prompts], 5)
  assert written == [*texts, texts[0].split("o")[0]]
  with pytest.raises(ValueError, match="beam"):
    adapter.generate_until([Instance("a", {"beam": 1})])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_local_files_run_like_our_own(offline, trained, model, capsys):
  output = offline / "results.json"
  names = [f"lm_eval:{offline}/{name}.yaml" for name in ("choice", "answer")]
  words = [f"--checkpoint={trained}", f"--tasks={','.join(names)}", f"--output={output}"]
  words += ["--rows=2", f"--log-samples={offline}/samples.jsonl"]
  assert main(["evaluate", *words, f"--fail-if={names[1]}.exact_match > 0.9"]) == Exit.DONE
  (record,) = json.loads(output.read_text())
  own = multiple_choice.make("m", str(offline / "problems.jsonl"), None)
  ours = own.run(model, request("run"), lambda sample: None)
  assert record["results"][names[0]] == {"acc": ours["accuracy"]}
  assert record["results"][names[1]].keys() == {"exact_match"}
  lines = (offline / "samples.jsonl").read_text().splitlines()
  parts = [json.loads(line)["lm_eval"] for line in lines]
  assert parts == ["local_choice"] * 3 + ["local_answer"] * 3


@pytest.mark.filterwarnings("ignore")
def test_a_task_that_cannot_be_loaded_is_one_sentence(offline):
  with pytest.raises(UsageError, match="is no file"):
    tasks.find_tasks(request("run", f"--tasks=lm_eval:{offline}/none.yaml"))
  (offline / "bad.yaml").write_text("task: [")
  with pytest.raises(UsageError, match="cannot be loaded by lm-eval"):
    tasks.find_tasks(request("run", f"--tasks=lm_eval:{offline}/bad.yaml"))
