"""Where the time of a profiled step goes, by part of the model.

A kernel's event names the instruction of the compiled program that it runs; the program's text says
which scope of the model the instruction comes from. Kernels that a GPU launches in one go, from a
command buffer, are known by their own names only: --xla_gpu_enable_command_buffer= in XLA_FLAGS
turns that off for a profile.
"""

import pathlib
import re
from collections import defaultdict

import jax

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?(?:op_name=\"([^\"]*)\")")
# The first that occurs in a scope names the part.
_PARTS = (
  ("optimizer", "optimizer"),
  ("indexer", "indexer"),
  ("jit(teacher)", "indexer"),
  ("jit(forward)", "attention"),
  ("jit(backward)", "attention"),
  ("compressor", "compressor"),
  ("experts", "routed experts"),
  ("shared", "shared expert"),
  ("moe", "router"),
  ("engram", "engram"),
  ("hc_", "hyper-connections"),
  ("attn", "attention's linear layers"),
  ("cd,vd->cv", "loss"),
  ("cv,cd->vd", "loss"),
  ("cv,vd->cd", "loss"),
)


def table(folder: str, program: str, steps: int) -> dict[str, float]:
  """Milliseconds a step on the first device, largest part first; "idle" is what no kernel fills.

  Args:
    folder: of `jax.profiler.trace`.
    program: text of the compiled step.
    steps: that were profiled.
  """
  scopes = dict(_scopes(program))
  total: dict[str, float] = defaultdict(float)
  first, last, busy = float("inf"), 0.0, 0.0
  newest = max(pathlib.Path(folder).rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
  for name, start, duration in _kernels(newest):
    total[_part(name, scopes)] += duration
    first, last, busy = min(first, start), max(last, start + duration), busy + duration
  total["idle"] = max(0.0, last - first - busy)
  scale = 1e-6 / steps  # from nanoseconds
  return dict(sorted(((k, v * scale) for k, v in total.items()), key=lambda item: -item[1]))


def _scopes(program: str):
  for line in program.splitlines():
    if found := _INSTRUCTION.match(line):
      yield found[1], found[2]


def _kernels(path: pathlib.Path):
  """(instruction, begin, duration) of what the first device ran, in nanoseconds."""
  data = jax.profiler.ProfileData.from_file(str(path))
  plane = next(p for p in data.planes if p.name.startswith(("/device:GPU:0", "/device:TPU:0")))
  for line in plane.lines:
    if not line.name.startswith(("Stream", "XLA Ops")):
      continue
    for event in line.events:
      stats = dict(event.stats)
      yield str(stats.get("hlo_op", event.name)), event.start_ns, event.duration_ns


def _part(instruction: str, scopes: dict[str, str]) -> str:
  scope = scopes.get(instruction, "")
  if any(kind in instruction for kind in ("all-gather", "all-to-all", "reduce-scatter", "all-red")):
    return "collectives"
  part = next((part for key, part in _PARTS if key in scope), None)
  return part or f"other: {scope.rsplit('/', 1)[-1] or instruction.split('.')[0]}"
