"""Google Kubernetes Engine: one JobSet, admitted by Kueue, restarted by its exit codes.

Restarts are JobSet's, for it sees all hosts: 42 and a taken machine start everything again without
limit, 1, 2 and 43 fail the JobSet, anything else is a crash, of which MAX_RESTARTS are allowed.
Fields: jobset.sigs.k8s.io (v1alpha2, message patterns since 0.10), kueue.sigs.k8s.io,
kubernetes.io/docs/tasks/job/pod-failure-policy.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from launch import request, xla_flags
from launch.request import MACHINES, Given, Option, Request
from launch.supervisor import FINAL, Policy
from launch.tool import hand_over
from train.errors import Exit

MAX_RESTARTS = 20  # crashes in the life of a JobSet, which cannot see checkpoints
CONTAINER = "train"
OPTIONS = MACHINES | {
  "--queue": Option("Kueue's local queue", required=True),
  "--image": Option("container image with the code in its working folder", required=True),
  "--namespace": Option("Kubernetes namespace", "default"),
  "--claim": Option("volume claim that all hosts share and where, as CLAIM:/mnt/runs", None),
  "--python": Option("the image's interpreter", "python"),
}


def main(argv: Sequence[str]) -> int:
  """Applies the JobSet. Returns an exit code; raises UsageError."""
  asked = request.parse(argv, OPTIONS, _problems)
  if asked.dry_run:
    print(manifest(asked))
    return Exit.DONE
  return hand_over("kubectl", ["kubectl", "apply", "-f", "-"], manifest(asked))


def manifest(asked: Request) -> str:
  """The JobSet as YAML, with a head that says how to follow and end it."""
  machines = asked.target
  here = f"-n {_namespace(asked)}"
  head = [
    f"{asked.verb} on {machines.slices} x {machines}, {machines.slices * machines.hosts} hosts",
    "Later:",
    f"  follow     kubectl logs {here} -f job/{asked.name}-slice-0 -c {CONTAINER}",
    f"  look       kubectl describe {here} jobset {asked.name}",
    f"  give back  kubectl delete {here} jobset {asked.name}",
  ]
  text = yaml.safe_dump(jobset(asked), sort_keys=False, width=1000)
  return "\n".join([asked.flag_lines(), *(f"# {line}" for line in head), text.rstrip()])


def jobset(asked: Request) -> dict[str, Any]:
  """The JobSet: one job per slice, one pod per host."""
  machines = asked.target
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {
      "name": asked.name,
      "namespace": _namespace(asked),
      "labels": {"kueue.x-k8s.io/queue-name": asked.options["--queue"]},
      # A slice is a node pool, and a job gets one for itself.
      "annotations": {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
      },
    },
    "spec": {
      "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": _restart_rules()},
      "replicatedJobs": [
        {"name": "slice", "replicas": machines.slices, "template": {"spec": _job(asked)}}
      ],
    },
  }


def _restart_rules() -> list[dict[str, Any]]:
  """The first that matches counts; a job that failed otherwise is restarted and counted."""
  codes = "|".join(str(int(code)) for code in sorted(FINAL))
  by_policy = lambda: {"onJobFailureReasons": ["PodFailurePolicy"]}
  return [
    {
      "name": "stop",
      "action": "FailJobSet",
      # The job controller's sentence ends "... failed with exit code 43 matching FailJob rule ...".
      **by_policy(),
      "onJobFailureMessagePatterns": [f"exit code ({codes}) "],
    },
    {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **by_policy()},
  ]


def _job(asked: Request) -> dict[str, Any]:
  machines = asked.target
  exits = lambda codes: {
    "action": "FailJob",
    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
  }
  return {
    "parallelism": machines.hosts,
    "completions": machines.hosts,
    "completionMode": "Indexed",
    "backoffLimit": 0,
    "podFailurePolicy": {
      "rules": [
        exits(sorted(int(code) for code in FINAL)),
        exits([int(Exit.PREEMPTED)]),
        {
          "action": "FailJob",
          "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
      ]
    },
    "template": {"spec": _pod(asked)},
  }


def _pod(asked: Request) -> dict[str, Any]:
  machines = asked.target
  accelerator = "nvidia.com/gpu" if machines.is_gpu else "google.com/tpu"
  variables = xla_flags.variables(asked.flags(), {})
  if machines.slices * machines.hosts > 1:
    variables["JAX_NUM_PROCESSES"] = "auto"  # launch/local.py says what it means
  container: dict[str, Any] = {
    "name": CONTAINER,
    "image": asked.options["--image"],
    "command": list(asked.command(asked.options.get("--python") or "python")),
    "env": [{"name": name, "value": value} for name, value in variables.items()],
    "resources": {"limits": {accelerator: machines.chips_per_host}},
  }
  pod: dict[str, Any] = {
    "restartPolicy": "Never",
    "terminationGracePeriodSeconds": int(Policy().stop_seconds),
    "nodeSelector": _nodes(asked),
    "containers": [container],
  }
  if claim := asked.options.get("--claim"):
    name, _, path = claim.partition(":")
    container["volumeMounts"] = [{"name": "shared", "mountPath": path}]
    pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": name}}]
  if machines.slices > 1:  # the data-centre network at full speed (jobset.sigs.k8s.io, multislice)
    pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
  return pod


def _nodes(asked: Request) -> dict[str, str]:
  machines = asked.target
  if machines.is_gpu:
    return {"cloud.google.com/gke-accelerator": machines.kind.node}
  return {
    "cloud.google.com/gke-tpu-accelerator": machines.kind.node,
    "cloud.google.com/gke-tpu-topology": machines.topology,
  }


def _namespace(asked: Request) -> str:
  return asked.options.get("--namespace") or "default"


def _problems(given: Given) -> Iterator[str]:
  machines = given.machines
  if machines and machines.is_gpu and machines.hosts > 1:
    yield (
      f"--topology {machines}: GPU pods on several hosts need network annotations of the cluster's "
      f"own; at most {machines.kind.chip.per_host} here, or use slurm."
    )
  claim = given.options.get("--claim")
  name, _, path = (claim or "").partition(":")
  if claim and not (name and path.startswith("/")):
    yield f"--claim must be written as CLAIM:/PATH, got {claim}."
  elif given.workdir and "://" not in given.workdir and not _lies_in(given.workdir, path):
    where = f"in {path}" if path else "in the folder of a --claim"
    yield (
      f"--workdir {given.workdir} would be lost with its pod; give a gs:// address or one {where}."
    )


def _lies_in(workdir: str, folder: str) -> bool:
  return bool(folder) and pathlib.PurePosixPath(workdir).is_relative_to(folder)
