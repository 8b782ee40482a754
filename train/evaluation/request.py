"""What `evaluate` was asked for: its arguments, understood."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from deepseek_jax.storage_path import url_problem
from deepseek_jax.training_config import MeshConfig
from train import settings
from train.arguments import Numbers, read_mesh, read_numbers
from train.errors import UsageError
from train.evaluation.conditions import Condition, read_condition

USAGE = """python -m train evaluate --checkpoint DIR --tasks A,B [--NAME VALUE ...]

--checkpoint   folder of a run, a step of one, or a released checkpoint
--tasks        what to measure, separated by commas:
{tasks}
--step         of a run: latest, all, or the number of a step (latest)
--data         folders of prepared data, separated by commas: text, and the tokenizer of the first;
               the run's where it is left out
--limit        rows or problems of each task, the first ones; all where it is left out
--rows         rows that are computed at a time; results do not depend on it (8)
--seed         of everything that is drawn (0)
--cache        of generation. packed: FP4 and FP8 bytes as the release serves them; plain: as
               computed (packed)
--mesh         devices to spread over, as in fsdp=2,expert=4 (one device)
--output       results.json: results of the same checkpoint and settings that it holds are kept
--log-samples  samples.jsonl: a line for every row or problem
--fail-if      'task.metric > number', also with <, >=, <=; exit code 1 where it holds. May be given
               several times
--watch        evaluate the checkpoints of a run as they appear, up to its last step
--execute      run generated programs (humaneval), each in a process with limits of time and memory
--samples      programs that humaneval writes for each problem (1)"""
TEXTS = ("--checkpoint", "--tasks", "--step", "--data", "--cache", "--mesh")
FILES = ("--output", "--log-samples")
FAIL_IF = "--fail-if"
SWITCHES = ("--watch", "--execute")
NUMBERS: Numbers = {
  "--limit": (None, "at least 1", lambda n: n >= 1),
  "--rows": (8, "at least 1", lambda n: n >= 1),
  "--seed": (0, "from 0 to 2147483647", lambda n: 0 <= n < 2**31),
  "--samples": (1, "at least 1", lambda n: n >= 1),
}
CACHES = {"packed": True, "plain": False}
LATEST, ALL = "latest", "all"


class Request(NamedTuple):
  checkpoint: str
  tasks: tuple[str, ...]
  step: str | int  # LATEST, ALL or a number
  data: tuple[str, ...]  # empty: the run's
  limit: int | None  # rows or problems of a task
  rows: int
  seed: int
  packed: bool  # whether generation keeps rows in the bytes of the release
  mesh: MeshConfig
  output: str | None
  log_samples: str | None
  fail_if: tuple[Condition, ...]
  watch: bool
  execute: bool  # programs that were generated
  samples: int  # of each problem of humaneval

  def decides(self) -> dict[str, Any]:
    """JSON-able: what results depend on, beside checkpoint and task."""
    return {"seed": self.seed, "limit": self.limit, "cache": "packed" if self.packed else "plain"}


def parse(argv: Sequence[str]) -> Request:
  """The command line. Raises UsageError with every problem."""
  argv, conditions = _repeated(argv, FAIL_IF)
  found = settings.split(argv, (*TEXTS, *FILES, *NUMBERS, FAIL_IF), switches=SWITCHES)
  values, problems = found.values, list(found.problems)
  refused = "is not an argument: a checkpoint brings its configuration."
  problems += [f"--config.{key} {refused}" for key in found.overrides]
  problems += [f"{name} is missing." for name in ("--checkpoint", "--tasks") if name not in values]
  split = lambda name: tuple(filter(None, values.get(name, "").split(",")))
  named = [("--checkpoint", values.get("--checkpoint", ""))]
  named += [("--data", path) for path in split("--data")]
  named += [(name, values.get(name, "")) for name in FILES]
  problems += [p for name, text in named for p in (url_problem(name, text),) if p]
  if (cache := values.get("--cache", "packed")) not in CACHES:
    problems.append(f"--cache is {cache!r}, accepted are {' and '.join(CACHES)}.")
  watch, step = "--watch" in found.flags, values.get("--step", LATEST)
  step = int(step) if step.isdecimal() else step
  if step not in (LATEST, ALL) and not isinstance(step, int):
    problems.append(f"--step is {step!r}, accepted are {LATEST}, {ALL} and the number of a step.")
  elif watch and isinstance(step, int):
    problems.append(f"--step {step} is one step; --watch goes with {LATEST} or {ALL}.")
  numbers, wrong = read_numbers(values, NUMBERS)
  mesh, wrong_mesh = read_mesh(values.get("--mesh"))
  read = [read_condition(text) for text in conditions]
  problems += [*wrong, *wrong_mesh, *(p for p in read if isinstance(p, str))]
  if problems:
    raise UsageError(problems)
  return Request(
    checkpoint=values["--checkpoint"],
    tasks=split("--tasks"),
    step=step,
    data=split("--data"),
    limit=numbers["--limit"],
    rows=numbers["--rows"],
    seed=numbers["--seed"],
    packed=CACHES[cache],
    mesh=mesh,
    output=values.get("--output"),
    log_samples=values.get("--log-samples"),
    fail_if=tuple(c for c in read if isinstance(c, Condition)),
    watch=watch,
    execute="--execute" in found.flags,
    samples=numbers["--samples"],
  )


def _repeated(argv: Sequence[str], name: str) -> tuple[list[str], list[str]]:
  """The arguments without those of a name that may be given several times, and its values."""
  rest, values, words = [], [], list(argv)
  while words:
    word, equals, value = words.pop(0).partition("=")
    if word != name or not (equals or words):
      rest.append(f"{word}{equals}{value}")
    else:
      values.append(value if equals else words.pop(0))
  return rest, values
