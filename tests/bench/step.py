"""Speed and memory of the whole training step of a configuration, on random tokens.

  python -m tests.bench step --config configs/small.py [--config.KEY=VALUE ...] [--steps 30]
      [--json F] [--profile DIR]

Every row is one document of random tokens, so that every query sees as much as it can. Prints one
record: tokens per second, the spread of the step's time, MFU by deepseek_jax.flops, memory and
compile seconds; with --profile also where the time goes, by part of the model.
"""

import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import Settings
from deepseek_jax.flops import flops_per_token, peak_flops
from deepseek_jax.layout import Document, Layout, build_layout, stack_layouts
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sharding import make_mesh
from tests.bench import document, measure, step_parts
from train.batches import abstract_batch
from train.programs import Programs, build_programs

_WARM_UP = 3  # steps before the clock starts
_PROFILED = 2
ARGUMENTS = ("--config", "--steps", "--json", "--profile")


def main(words: list[str]) -> int:
  settings, arguments = document.read(words, ARGUMENTS)
  given = arguments.values
  prepared = prepare(settings)
  print(f"Compiled in {prepared.compile_seconds:.1f} s.", file=sys.stderr, flush=True)
  measured = run(prepared, int(given.get("--steps", "30")), given.get("--profile"))
  document.write("step", arguments, measured)
  return 0


class Prepared(NamedTuple):
  """A step that is compiled and has not run."""

  settings: Settings
  mesh: Mesh
  programs: Programs
  abstract_batch: Layout
  step: Any
  compile_seconds: float


def prepare(settings: Settings, *, replayed: bool = False) -> Prepared:
  """Compiles the step for all devices, for rows with or without replay."""
  mesh = make_mesh(settings.mesh)
  with jax.set_mesh(mesh):
    programs = build_programs(settings, mesh)
    batch = abstract_batch(settings, mesh, replayed=replayed)
    began = time.perf_counter()
    step = programs.step.lower(programs.abstract_state, batch).compile()
  return Prepared(settings, mesh, programs, batch, step, time.perf_counter() - began)


def run(
  prepared: Prepared, steps: int, profile: str | None, batches: list[Layout] | None = None
) -> dict[str, Any]:
  """Takes `steps` steps after a warm-up, on two batches in turn: random ones, or those given."""
  settings, mesh, programs, shapes, step, _ = prepared
  with jax.set_mesh(mesh):
    state = programs.create()
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    batches = batches or [random_batch(settings, n) for n in range(2)]
    batches = [jax.device_put(batch, shardings) for batch in batches]
    seconds, losses = [], []
    for number in range(_WARM_UP + steps):
      began = time.perf_counter()
      state, metrics = step(state, batches[number % 2])
      losses.append(float(metrics["loss"]))  # waits for the step
      seconds.append(time.perf_counter() - began)
      print(f"step {number + 1}: {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    parts = None
    if profile is not None:
      with jax.profiler.trace(profile):
        for number in range(_PROFILED):
          state, metrics = step(state, batches[number % 2])
          jax.block_until_ready(metrics)
      parts = step_parts.table(profile, step.as_text(), _PROFILED)
  values = {name: float(value) for name, value in metrics.items() if "layer" not in name}
  return _record(prepared, sorted(seconds[_WARM_UP:])) | {
    "losses": [losses[0], losses[-1]],
    "metrics": values,
    "milliseconds_by_part": parts,
  }


def _record(prepared: Prepared, times: list[float]) -> dict[str, Any]:
  settings, devices = prepared.settings, prepared.mesh.devices.size
  kind = prepared.mesh.devices.flat[0].device_kind
  tokens = settings.data.batch_rows * settings.data.slots
  p50, p95 = statistics.median(times), times[round(0.95 * (len(times) - 1))]
  rate = flops_per_token(settings.model, "train", settings.data.slots) * tokens / p50 / devices
  peak = peak_flops(kind)
  return {
    "device": f"{devices} x {kind}",
    "mesh": dict(prepared.mesh.shape),
    "tokens": tokens,
    "compile_seconds": prepared.compile_seconds,
    "step_seconds": {"p50": p50, "p95": p95, "p95/p50": p95 / p50},
    "tokens_per_second": tokens / p50,
    "tflops_per_second_and_device": rate / 1e12,
    "mfu": None if peak is None else rate / peak,
    "memory": measure.memory(prepared.step) | {"device_peak_bytes": measure.device_peak_bytes()},
  }


def random_batch(settings: Settings, seed: int) -> Layout:
  """Rows of one document each."""
  rng = np.random.default_rng(seed)
  model, slots, hashing = settings.model, settings.data.slots, hashing_of(settings)
  document = lambda: Document(rng.integers(0, model.vocab, slots, np.int32))
  row = lambda: build_layout([document()], slots=slots, ratios=model.ratios, hashing=hashing)
  return stack_layouts([row() for _ in range(settings.data.batch_rows)])


def hashing_of(settings: Settings) -> NgramHash | None:
  """Engram's hash of a tokenizer that there is none of."""
  engram = settings.model.engram
  classes = np.arange(settings.model.vocab, dtype=np.int32) % max(engram.compressed_vocab, 1)
  return NgramHash(engram, classes) if engram.layers else None
