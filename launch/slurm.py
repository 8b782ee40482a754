"""Slurm: an sbatch script with one supervised process per GPU machine.

Slurm gives the processes SIGTERM before the time is over, they save and end with 42, and the script
puts itself back into the queue. A lost machine puts it back too. Options: slurm.schedmd.com/sbatch.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence

from launch import request
from launch.request import MACHINES, REPOSITORY, Given, Option, Request
from launch.supervisor import Policy
from launch.tool import hand_over
from train.errors import Exit

OPTIONS = {name: option for name, option in MACHINES.items() if name != "--slices"} | {
  "--time": Option("limit for one stay in the queue's machines, as Slurm writes it", "the queue's"),
  "--partition": Option("Slurm partition", "the cluster's"),
  "--account": Option("Slurm account", "the user's"),
}


def main(argv: Sequence[str]) -> int:
  """Submits the script. Returns an exit code; raises UsageError."""
  asked = request.parse(argv, OPTIONS, _problems)
  if asked.dry_run:
    print(script(asked))
    return Exit.DONE
  return hand_over("sbatch", ["sbatch"], script(asked))


def script(asked: Request) -> str:
  """The batch script. Its folder and interpreter are ours: Slurm's machines share the files."""
  machines, name = asked.target, asked.name
  given = {f"--{key}": asked.options.get(f"--{key}") for key in ("time", "partition", "account")}
  head = {
    "--job-name": name,
    "--nodes": machines.hosts,
    "--ntasks-per-node": 1,  # JAX uses all GPUs of a machine from one process
    "--gpus-per-node": machines.chips_per_host,
    "--exclusive": None,
    "--requeue": None,  # after the loss of a machine
    "--open-mode": "append",  # the output of every stay
    "--output": f"{name}-%j.log",
    # To every task, so long before the end that a step can be finished and saved.
    "--signal": f"TERM@{int(Policy().stop_seconds)}",
    **{key: value for key, value in given.items() if value},
  }
  lines = [f"#SBATCH {key}" + ("" if value is None else f"={value}") for key, value in head.items()]
  gpus = ",".join(map(str, range(machines.chips_per_host)))
  return f"""\
#!/usr/bin/env bash
{"\n".join(lines)}
# {asked.verb} on {machines}, {machines.hosts} hosts
{asked.flag_lines()}
#
# Later:
#   follow  tail -f {name}-JOB.log
#   look    scontrol show job JOB
#   stop    scontrol update JobId=JOB Requeue=0; scancel --signal=TERM JOB
set -uo pipefail

cd {shlex.quote(str(REPOSITORY))} || exit {Exit.USAGE.value}
export JAX_LOCAL_DEVICE_IDS={gpus}  # under Slurm, JAX would take one GPU for each process
srun --kill-on-bad-exit=0 {shlex.join(_task(asked))}
code=$?
if [ "$code" -eq {Exit.PREEMPTED.value} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""


def _task(asked: Request) -> tuple[str, ...]:
  processes = f"--processes={'auto' if asked.target.hosts > 1 else 1}"
  launcher = (sys.executable, "-m", "launch", "local", processes, "--device=gpu")
  return (*launcher, f"--verb={asked.verb}", *asked.training)


def _problems(given: Given) -> Iterator[str]:
  if given.machines and not given.machines.is_gpu:
    yield f"--topology {given.machines}: slurm is for GPUs; use tpu-vm or gke."
