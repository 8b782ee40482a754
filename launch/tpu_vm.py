"""TPU virtual machines: a queued resource, a wait for it, and the supervisor on every host.

Commands: cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources and .../tpu-vm. The
hosts find each other through JAX; each has a supervisor of its own, so that when one process dies
and takes the others with it, all start again together. Machines that were taken away do not come
back: give their queued resource back and launch again.
"""

import shlex
from collections.abc import Iterator, Sequence

from launch import request
from launch.machines import KINDS
from launch.request import MACHINES, REPOSITORY, Given, Option, Request
from launch.tool import hand_over
from train.errors import Exit

RUNTIMES = ", ".join(kind.runtime for kind in KINDS.values() if kind.runtime)
OPTIONS = MACHINES | {
  "--zone": Option("zone of the TPUs", required=True),
  "--project": Option("project that pays", "of gcloud's configuration"),
  "--runtime-version": Option(f"software of the machines, as {RUNTIMES}", "by --topology"),
  "--setup": Option(
    "shell command that prepares the code's folder on each host; needs Python 3.12 there",
    "make setup && .venv/bin/python -m pip install -q 'jax[tpu]'",
  ),
  "--spot": Option("machines that may be taken away, for less money", switch=True),
}


def main(argv: Sequence[str]) -> int:
  """Creates the machines and starts the run. Returns an exit code; raises UsageError."""
  asked = request.parse(argv, OPTIONS, _problems)
  if asked.dry_run:
    print(script(asked))
    return Exit.DONE
  # Not on standard input, where ssh would read the rest of it.
  return hand_over("gcloud", ["bash", "-c", script(asked)])


def script(asked: Request) -> str:
  """Everything from the queued resource to the running supervisors, for bash."""
  machines, name = asked.target, asked.name
  nodes = [name] if machines.slices == 1 else [f"{name}-{i}" for i in range(machines.slices)]
  project = asked.options.get("--project")
  where = shlex.join(
    [f"--zone={asked.options['--zone']}", *[f"--project={project}"] * bool(project)]
  )
  queued = lambda verb: f"gcloud compute tpus queued-resources {verb} {name} {where}"
  ssh = lambda node, worker, command: (
    f"gcloud compute tpus tpu-vm ssh {node} {where} --worker={worker} "
    f"--command={shlex.quote(command)}"
  )
  each = f"for node in {' '.join(nodes)}; do"
  return f"""\
#!/usr/bin/env bash
# {asked.verb} on {machines.slices} x {machines}, {machines.slices * machines.hosts} hosts
{asked.flag_lines()}
#
# Later:
#   follow     {ssh(nodes[0], 0, f"tail -n 20 -f {name}/log")}
#   look       {queued("describe")}
#   stop       {each} {ssh("$node", "all", f"kill -TERM $(cat {name}/pid)")}; done
#   give back  {queued("delete")} --force
set -euo pipefail

{queued("create")} \\
  {" ".join(_shape(asked, nodes))}
while :; do
  state=$({queued("describe")} '--format=value(state.state)')
  case $state in
    ACTIVE) break ;;
    FAILED | SUSPENDING | SUSPENDED) echo "{name} is $state." >&2; exit 1 ;;
  esac
  echo "{name} is $state."
  sleep 60
done

# What is committed goes to every host.
code=$(mktemp -d)
trap 'rm -r "$code"' EXIT
git -C {shlex.quote(str(REPOSITORY))} archive --format=tar.gz -o "$code/{name}.tar.gz" HEAD
{each}
  gcloud compute tpus tpu-vm scp "$code/{name}.tar.gz" "$node": {where} --worker=all
  {ssh('"$node"', "all", _prepare(asked))}
done
{each}
  {ssh('"$node"', "all", _start(asked))}
done"""


def _problems(given: Given) -> Iterator[str]:
  machines = given.machines
  if machines and machines.kind.runtime is None:
    kinds = " and ".join(name for name, kind in KINDS.items() if kind.runtime)
    other = "slurm or gke" if machines.is_gpu else "gke"
    yield f"--topology {machines}: as TPU VMs there are {kinds}; use {other}."
  relative = given.workdir and not given.workdir.startswith("/") and "://" not in given.workdir
  if machines and machines.slices * machines.hosts > 1 and relative:
    yield (
      f"--workdir {given.workdir} would be another folder on each host; give one that all of them "
      "see, as a mounted /path or a gs:// address."
    )


def _shape(asked: Request, nodes: Sequence[str]) -> Iterator[str]:
  machines = asked.target
  yield f"--type={machines.name}"
  yield f"--topology={machines.topology}"
  yield f"--runtime-version={asked.options.get('--runtime-version') or machines.kind.runtime}"
  if len(nodes) == 1:
    yield f"--node-id={nodes[0]}"
  else:
    yield f"--node-count={len(nodes)}"
    yield f"--node-prefix={asked.name}"
  if "--spot" in asked.options:
    yield "--spot"


def _prepare(asked: Request) -> str:
  setup = asked.options.get("--setup") or OPTIONS["--setup"].default
  name = asked.name
  return f"mkdir -p {name} && tar -xzf {name}.tar.gz -C {name} && cd {name} && {setup}"


def _start(asked: Request) -> str:
  """Detached, for the connection will not last as long as the run."""
  machines = asked.target
  own = [
    f"--processes={'auto' if machines.slices * machines.hosts > 1 else 1}",
    f"--device={machines.kind.flags}",
    f"--slices={machines.slices}",
    f"--verb={asked.verb}",
  ]
  launcher = (".venv/bin/python", "-m", "launch", "local")
  command = shlex.join([*launcher, *own, *asked.training])
  return f"cd {asked.name} && (nohup {command} >log 2>&1 </dev/null & echo $! >pid)"
