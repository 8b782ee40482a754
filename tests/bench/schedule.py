"""Cycles of the TPU kernels, read from the compiler's final schedule; no TPU is needed.

A TPU core issues one bundle of instructions per cycle, in the order that the compiler laid down. So
the number of bundles of a loop body is its time, as far as no load, copy or memory bank makes it
wait: a lower bound, and the one to compare two versions of a kernel with. Compiled is not run.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from deepseek_jax.ops.sparse_attention import pallas_tpu, tpu_plan
from tests.aot import targets

# Clock in GHz and cores of a chip. The clocks reproduce the listed bfloat16 peaks (459, 920 and
# 2,310 TFLOP/s) with four matrix units of 128 columns on v5p and two of 256 on the others.
CHIPS = {"v5p": (1.75, 2), "v6e": (1.75, 1), "tpu7x": (2.2, 2)}

# The release's attention: docs/model.md section 2.4.
QUERIES, ENTRIES, HEADS, WIDTH, TOP_K, WINDOW = 8192, 32768, 64, 512, 512, 128
BLOCK = 2 * WINDOW  # places of a block of a list
SHARES = (0.0, 0.5, 0.9)  # of a selection that neighbouring queries have in common

_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(?:([A-Z]{2})\s*)?:\s*((?:>\s?)*)\s*(.*)")
_BRANCH = "sbr.rel"
_COMPILE_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Bundle:
  depth: int  # loops around it; the grid is one
  label: str | None  # LB: a loop begins; PF: what a branch may skip has ended
  branches: bool
  used: tuple[int, ...]  # slots of each kind


def run(
  chips: Sequence[str] = tuple(CHIPS),
  kernels: Sequence[str] | None = None,
  tiles: Sequence[int] | None = None,
) -> list[dict]:
  """One record for each chip, kernel and tile; one that is refused has `error` in it.

  Args:
    chips: of CHIPS.
    kernels: of KERNELS; None for all.
    tiles: queries that share a list; None for each chip's own.
  """
  if importlib.util.find_spec("libtpu") is None:
    return [{"chip": chip, "error": "libtpu is not installed"} for chip in chips]
  cases = [
    (chip, kernel, tile) for chip in chips for kernel in kernels or KERNELS for tile in tiles or [0]
  ]
  return [_record(*case) for case in cases]


def _record(chip: str, kernel: str, tile: int) -> dict:
  record: dict = {"chip": chip, "kernel": kernel}
  with tempfile.TemporaryDirectory() as folder:
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    done = subprocess.run(
      [sys.executable, "-m", "tests.bench.schedule", chip, kernel, str(tile)],
      env={
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes out of a cache is not scheduled
        "LIBTPU_INIT_ARGS": f"{flags} --xla_jf_dump_llo_pass_label_regex=final",
      },
      capture_output=True,
      text=True,
      timeout=_COMPILE_SECONDS,
      check=False,
    )
    if done.returncode != 0:
      return {**record, "error": done.stderr.strip().splitlines()[-1]}
    record["tile"] = int(done.stdout.split()[-1])
    # One program for each chunk of entries; the first has the window too.
    parts = [read(path) for path in pathlib.Path(folder).glob(f"*{kernel}*-final_bundles.txt")]
    record.update(max(parts, key=lambda part: part["tile_cycles"]), chunks=len(parts))
    record["tile_cycles"] = sum(part["tile_cycles"] for part in parts)
  record["tflops"] = _tflops(record)
  return record


def read(path: pathlib.Path) -> dict:
  """What the final bundles of one kernel say.

  Args:
    path: NUMBER-KERNEL-NN-final_bundles.txt; the file of used slots lies beside it.

  Returns: dict with `block_cycles` (of one block of a list, in the loop over pairs of blocks),
    `odd_block_cycles` (of the last one of an odd number), `tile_cycles` (of a tile, besides its
    blocks and what only the first and last tile of a core do), `slots` (used share of each kind
    of slot in the loop) and `no_matrix` (share of the loop's cycles without matrix work).
  """
  kinds, capacity, used = _slots(path)
  bundles = _bundles(path, used)
  begin, end = _largest_loop(bundles)
  loop = bundles[begin:end]
  skipped = _branches(bundles, begin)
  outside = [
    b
    for i, b in enumerate(bundles)
    if b.depth == 1 and not any(first <= i < last for first, last in skipped)
  ]
  total = [sum(b.used[kind] for b in loop) for kind in range(len(kinds))]
  return {
    "block_cycles": len(loop) / 2,
    # The first stretch behind the loop takes the last block where their number is odd.
    "odd_block_cycles": next(last - first for first, last in skipped if first >= end),
    "tile_cycles": len(outside),
    "no_matrix": round(sum(b.used[kinds.index("MXU")] == 0 for b in loop) / len(loop), 3),
    "slots": {
      kind: round(count / size / len(loop), 3)
      for kind, count, size in zip(kinds, total, capacity, strict=True)
    },
  }


def _slots(path: pathlib.Path):
  """Kinds of slots, how many of each a bundle has, and the slots that every bundle uses."""
  prefix = path.name.rsplit("-", 2)[0]
  (text,) = [p.read_text() for p in path.parent.glob(f"{prefix}-*final_hlo-static-per-bundle*")]
  head, body = text.split("== UTILIZATION:")
  kinds, capacity = head.strip().splitlines()[-2:]
  rows = [tuple(int(x) for x in line.split()) for line in body.strip().splitlines()]
  return [kind.strip() for kind in kinds.split(",")], [int(x) for x in capacity.split()], rows


def _bundles(path: pathlib.Path, used) -> list[Bundle]:
  bundles = []
  for line in path.read_text().splitlines():
    match = _BUNDLE.match(line)
    if match and int(match[1], 16) == len(bundles):  # a bundle may go on over several lines
      # Empty bundles, where a branch waits, do not say where they are.
      depth = bundles[-1].depth if match[4] == "{}" and bundles else match[3].count(">")
      bundles.append(Bundle(depth, match[2], _BRANCH in match[4], used[len(bundles)]))
    elif bundles and _BRANCH in line:
      bundles[-1] = dataclasses.replace(bundles[-1], branches=True)
  return bundles


def _largest_loop(bundles: Sequence[Bundle]) -> tuple[int, int]:
  """Of the loops inside the grid."""
  starts = [i for i, b in enumerate(bundles) if b.label == "LB" and b.depth > 1]
  loops = []
  for begin in starts:
    end = begin
    while bundles[end].depth >= bundles[begin].depth:
      end += 1
    loops.append((begin, end))
  return max(loops, key=lambda loop: loop[1] - loop[0])


def _branches(bundles: Sequence[Bundle], loop_begin: int) -> list[tuple[int, int]]:
  """Stretches of the grid's body that a branch can skip, but for the one around the loop."""
  waiting, skipped = [], []
  for i, bundle in enumerate(bundles):
    if bundle.depth != 1:
      continue
    if bundle.label == "PF" and waiting:
      begin = waiting.pop()
      if not begin <= loop_begin < i:
        skipped.append((begin, i))
    closes_loop = bundles[i - 1].depth > 1
    if bundle.branches and not closes_loop:
      waiting.append(i + 1)
  return skipped


def _tflops(record: dict) -> dict[str, float]:
  """TFLOP/s of a chip for selections of which neighbours share a part, if nothing ever waits.

  Counts 640 keys per query: 4 (forward) or 10 (backward) x 64 x 640 x 512 operations.
  """
  clock, cores = CHIPS[record["chip"]]
  products = 4 if "forward" in record["kernel"] else 10
  operations = products * HEADS * (TOP_K + WINDOW) * WIDTH
  rates = {}
  for share in SHARES:
    distinct = TOP_K * (1 + (record["tile"] - 1) * (1 - share))
    blocks = max(-(-distinct // BLOCK), tpu_plan.LEAST_BLOCKS)
    blocks += record["chunks"] - 1  # a block between two chunks is visited for both
    cycles = record["tile_cycles"] + blocks // 2 * 2 * record["block_cycles"]
    cycles += blocks % 2 * record["odd_block_cycles"]
    seconds = cycles / (clock * 1e9 * record["tile"])
    rates[f"{share:.0%} shared"] = round(operations / seconds / 1e12 * cores, 1)
  return rates


def _attention_arguments(tile: int):
  """Shapes of q, window KV, entry KV, selection, segment starts, sink; and of the plan."""
  struct = jax.ShapeDtypeStruct
  selection = struct((1, QUERIES, TOP_K), jnp.int32)
  chip = tpu_plan.chip()._replace(tile=tile) if tile else tpu_plan.chip()
  make = lambda selection: pallas_tpu.plan(selection, ENTRIES, window=WINDOW, chip=chip)
  arrays = (
    struct((1, QUERIES, HEADS, WIDTH), jnp.bfloat16),
    struct((1, QUERIES, WIDTH), jnp.bfloat16),
    struct((1, ENTRIES, WIDTH), jnp.bfloat16),
    selection,
    struct((1, QUERIES), jnp.int32),
    struct((HEADS,), jnp.float32),
  )
  return arrays, jax.eval_shape(make, selection)


def _attention_forward(tile: int):
  arrays, plan = _attention_arguments(tile)
  fn = lambda *arrays: pallas_tpu.forward(*arrays, window=WINDOW)
  return fn, (*arrays, plan), plan.tile


def _attention_backward(tile: int):
  (q, window_kv, entry_kv, selection, segment_start, _), plan = _attention_arguments(tile)
  statistic = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
  fn = lambda *arrays: pallas_tpu.backward(*arrays, window=WINDOW)
  arrays = (q, window_kv, entry_kv, selection, segment_start, plan, statistic, statistic, q)
  return fn, arrays, plan.tile


# Name of the kernel in the compiled program -> its function, shapes and tile.
KERNELS: dict[str, Callable] = {
  "sparse_attention_forward": _attention_forward,
  "sparse_attention_backward": _attention_backward,
}


def main(chip: str, kernel: str, tile: str) -> None:
  """Compiles one kernel in this process; the compiler's files go where the environment says."""
  target = targets.tpu(chip)
  with targets.tracing_for(target):
    fn, shapes, tile_used = KERNELS[kernel](int(tile))
  targets.compile_for(target, fn, *shapes)
  print(tile_used)


if __name__ == "__main__":
  main(*sys.argv[1:])
