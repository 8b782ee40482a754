"""The JobSet is one that the cluster accepts, and it restarts by the exit codes."""

import copy
import json
import pathlib
import re

import pytest
import yaml

from launch.__main__ import main
from tests.launch.conftest import arguments, without_tools

SCHEMA = json.loads((pathlib.Path(__file__).parent / "jobset_schema.json").read_text())
QUEUE = ("--queue=research", "--image=registry.example/train:1", "--claim=runs:/shared")
CASES = {
  "one host": ("--topology=v5p:2x2x1", "--config.mesh.fsdp=4"),
  "one slice": ("--topology=v6e:4x4", "--config.mesh.fsdp=16"),
  "two slices": (
    "--topology=tpu7x:2x2x2",
    "--slices=2",
    "--config.mesh.replica=2",
    "--config.mesh.fsdp=16",
  ),
  "GPUs": ("--topology=h200:8", "--config.mesh.fsdp=8"),
}


@pytest.fixture(params=CASES)
def jobset(request, capsys):
  assert main(["gke", *arguments("--dry-run", *QUEUE, *CASES[request.param])]) == 0
  return yaml.safe_load(capsys.readouterr().out)


def job_of(jobset):
  return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


def validator():
  jsonschema = pytest.importorskip("jsonschema")
  return jsonschema.Draft202012Validator(SCHEMA)


def test_the_jobset_fits_its_schema(jobset):
  assert [error.message for error in validator().iter_errors(jobset)] == []


def test_the_schema_notices_a_misspelt_field(jobset):
  wrong = copy.deepcopy(jobset)
  wrong["spec"]["failurePolicy"]["maxRestart"] = wrong["spec"]["failurePolicy"].pop("maxRestarts")
  assert not validator().is_valid(wrong)


def test_the_job_in_it_is_one_that_kubernetes_knows(jobset):
  kubernetes = pytest.importorskip("kubernetes_validate")
  job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_of(jobset)}
  kubernetes.validate(job, "1.31", strict=True)  # the first with a stable podFailurePolicy
  job["spec"]["template"]["spec"]["restartPolice"] = "Never"
  with pytest.raises(kubernetes.ValidationError):
    kubernetes.validate(job, "1.31", strict=True)


def outcome(jobset, code=None):
  """What the controllers do about a pod that ended with `code`, or whose node was taken away."""
  sentence, reason = "", "BackoffLimitExceeded"
  for index, rule in enumerate(job_of(jobset)["podFailurePolicy"]["rules"]):
    exits = rule.get("onExitCodes")
    if (code in exits["values"]) if exits else code is None:
      # The words of Kubernetes' job controller, pkg/controller/job/pod_failure_policy.go.
      what = f"failed with exit code {code}" if exits else "has condition DisruptionTarget"
      sentence, reason = f"... {what} matching FailJob rule at index {index}", "PodFailurePolicy"
      break
  for rule in jobset["spec"]["failurePolicy"]["rules"]:
    patterns = rule.get("onJobFailureMessagePatterns", [""])
    if reason in rule["onJobFailureReasons"] and any(re.search(p, sentence) for p in patterns):
      return rule["action"]
  return "RestartJobSet"


@pytest.mark.parametrize(
  ("code", "action"),
  [
    (1, "FailJobSet"),
    (2, "FailJobSet"),
    (43, "FailJobSet"),
    (42, "RestartJobSetAndIgnoreMaxRestarts"),
    (None, "RestartJobSetAndIgnoreMaxRestarts"),
    (134, "RestartJobSet"),
    (137, "RestartJobSet"),
    (3, "RestartJobSet"),
  ],
)
def test_the_exit_codes_decide_what_follows(jobset, code, action):
  assert outcome(jobset, code) == action


def test_every_chip_is_asked_for_once(jobset):
  job, replicas = job_of(jobset), jobset["spec"]["replicatedJobs"][0]["replicas"]
  container = job["template"]["spec"]["containers"][0]
  [chips] = container["resources"]["limits"].values()
  [fsdp] = [int(w.rpartition("=")[2]) for w in container["command"] if "mesh.fsdp" in w]
  per_chip = 2 if "tpu7x" in str(job["template"]["spec"]["nodeSelector"]) else 1
  assert job["parallelism"] == job["completions"]
  assert replicas * job["parallelism"] * chips * per_chip == fsdp * replicas


def test_a_pod_has_the_time_to_save(jobset):
  from train.signals import GRACE_SECONDS

  assert job_of(jobset)["template"]["spec"]["terminationGracePeriodSeconds"] > GRACE_SECONDS


@pytest.mark.parametrize(
  ("words", "sentence"),
  [
    (["--topology=h200:16", "--config.mesh.fsdp=16"], "at most 8 here, or use slurm"),
    (["--claim=runs"], "--claim must be written as CLAIM:/PATH, got runs."),
    (["--claim=runs:/elsewhere"], "give a gs:// address or one in /elsewhere."),
    (["--queue="], "--queue needs a value."),
  ],
)
def test_what_cannot_be_applied_is_refused(capsys, words, sentence):
  given = [word for word in QUEUE if not any(word.split("=")[0] in other for other in words)]
  topology = () if "topology" in words[0] else CASES["one host"]
  assert main(["gke", *arguments("--dry-run", *given, *topology, *words)]) == 2
  assert sentence in capsys.readouterr().err


def test_without_kubectl_a_sentence_says_so(capsys, monkeypatch, tmp_path):
  without_tools(monkeypatch, tmp_path)
  assert main(["gke", *arguments(*QUEUE, *CASES["one host"])]) == 2
  assert capsys.readouterr().err.startswith("kubectl is not installed here")
