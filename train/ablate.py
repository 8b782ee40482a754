"""`python -m train ablate`: trains one variant of a model from two seeds, or tables what did.

Legend: s seeds.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import Settings
from data.errors import DataError
from data.pipeline import validation_split
from deepseek_jax.flops import activated_parameters, flops_per_token, parameters
from deepseek_jax.layout import Layout
from deepseek_jax.model import Model
from deepseek_jax.sharding import make_mesh
from train import checks, plan_cache, settings
from train.ablation_table import table
from train.batches import empty_row, open_held_out, open_training, placer, row_group
from train.environment import environment
from train.errors import Exit, UsageError
from train.evaluate_loss import first_rows
from train.programs import build_programs

USAGE = """python -m train ablate --config FILE.py --only VARIANT --output F.json
                       [--config.KEY=VALUE ...]
python -m train ablate --table DIR

--only    train this variant of FILE.py, from two seeds in one program, on one device
--output  write what it came to
--table   print the files that are in DIR as one Markdown table"""
ARGUMENTS = ("--config", "--only", "--output", "--table")
SEEDS = 2
REPORTED = 20  # lines on the screen
WARM_UP = 5  # steps before the clock starts: the first calls allocate


class Request(NamedTuple):
  settings: Settings
  variant: str
  output: pathlib.Path


class Programs(NamedTuple):
  """Compiled; states hold every seed's, along a leading axis."""

  create: Callable[[], Any]  # () -> states
  step: Callable  # (states, batch) -> (states, metrics_s), consumes the states
  evaluate: Callable  # (states, batch) -> (nats_s, weights_s)


def main(argv: Sequence[str]) -> int:
  """Runs the verb. Returns its exit code; raises UsageError with every problem."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE)
    return Exit.DONE
  request = parse(argv)
  if isinstance(request, pathlib.Path):
    print(table(request))
    return Exit.DONE
  try:
    result = ablate(request.settings, request.variant)
  except DataError as error:
    print(error)
    return Exit.STOPPED
  partial = request.output.with_suffix(".partial")
  partial.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
  os.replace(partial, request.output)
  return Exit.DONE


def parse(argv: Sequence[str]) -> Request | pathlib.Path:
  """What to train, or the folder to print. Raises UsageError with every problem."""
  values, overrides, problems, _ = settings.split(argv, ARGUMENTS, switches=())
  if "--table" in values:
    folder = pathlib.Path(values.pop("--table"))
    problems += [f"{name} does not go with --table." for name in values]
    if not folder.is_dir():
      problems.append(f"--table {folder} is not a folder.")
    if problems:
      raise UsageError(problems)
    return folder
  problems += [f"{name} is missing." for name in ARGUMENTS[:3] if name not in values]
  output = pathlib.Path(values.get("--output", "."))
  if "--output" in values and output.suffix != ".json":
    problems.append(f"--output is {output}, accepted are names that end in .json.")
  if not output.parent.is_dir():
    problems.append(f"--output {output}: the folder {output.parent} does not exist.")
  if problems:
    raise UsageError(problems)
  variant = values["--only"]
  chosen = settings.load(f"{values['--config']}:{variant}", overrides)
  if problems := checks.problems(chosen, devices=1):
    raise UsageError(problems)
  return Request(chosen, variant, output)


def ablate(chosen: Settings, variant: str) -> dict[str, Any]:
  """Trains all seeds on the same batches and measures them on the validation split."""
  began = time.monotonic()
  mesh = make_mesh(chosen.mesh, jax.devices()[:1])
  group = row_group(chosen, mesh)
  place, pipeline = placer(mesh, group), open_training(chosen, group)
  with jax.set_mesh(mesh):
    programs = compile_programs(chosen, mesh)
    states = programs.create()
    compiled = time.monotonic()
    batches = (place(batch.layout) for batch in pipeline)
    states, curve, speed = _train(chosen, programs, states, batches)
    rows = first_rows(open_held_out(chosen, group), chosen.validation.rows)
    sums = [programs.evaluate(states, place(batch.layout)) for batch in rows]
  nats_s, targets_s = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
  split, slots = validation_split(chosen.data), chosen.data.slots
  seen = environment()
  result = {
    "variant": variant,
    "date": datetime.date.today().isoformat(),
    "seeds": [chosen.seed + n for n in range(SEEDS)],
    "tokens": chosen.total_steps * chosen.data.batch_rows * slots,
    "data": pipeline.fingerprint,
    "parameters": parameters(chosen.model)["total"],
    "activated_parameters": activated_parameters(chosen.model)["decode"],
    "training_flops_per_token": flops_per_token(chosen.model, "train", slots),
    "prefill_flops_per_token": flops_per_token(chosen.model, "prefill", slots),
    "kv_bytes_per_token": plan_cache.kv_bytes_per_token(chosen.model)["global"],
    "bits_per_byte": [
      split.bits_per_byte(float(n / t)) for n, t in zip(nats_s, targets_s, strict=True)
    ],
    "loss": curve,
    "tokens_per_second": speed,
    "seconds": {"start": compiled - began, "all": time.monotonic() - began},
    "versions": seen["versions"],
    "devices": seen["devices"],
    "config": dataclasses.asdict(chosen),
  }
  bits = ", ".join(f"{b:.4f}" for b in result["bits_per_byte"])
  print(f"{variant}: {bits} bits per byte, {speed:,.0f} tokens/s, {result['seconds']['all']:.0f} s")
  return result


def compile_programs(chosen: Settings, mesh: Mesh) -> Programs:
  """What a variant needs, each seed after the other inside one program.

  A loop over seeds keeps the kernels, some of which JAX cannot batch.
  """
  of_one = build_programs(chosen, mesh)
  model, row = Model(chosen.model, indexer_loss=chosen.objective.indexer), empty_row(chosen)

  def create() -> Any:
    def one(seed: jax.Array) -> Any:
      # Random bits of the device's own generator: threefry for every array takes a minute to
      # compile on a GPU (docs/log.md).
      variables = nn.unbox(model.init(jax.random.key(seed, impl="rbg"), row))
      return of_one.start(variables["params"], variables["balance"])

    return jax.lax.map(one, chosen.seed + jnp.arange(SEEDS))

  over_seeds = lambda fn: lambda states, batch: jax.lax.map(lambda s: fn(s, batch), states)
  evaluate = over_seeds(lambda s, batch: of_one.evaluate(s.params, s.balance, batch))
  # Said of shapes too, so that programs compile for a device that is not here.
  on_mesh = NamedSharding(mesh, PartitionSpec())
  struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_mesh)
  shapes, batch = jax.tree.map(struct, jax.eval_shape(create)), of_one.abstract_batch
  lowered = (
    jax.jit(create, out_shardings=on_mesh).lower(),
    jax.jit(over_seeds(of_one.step), donate_argnums=0).lower(shapes, batch),
    jax.jit(evaluate).lower(shapes, batch),
  )
  with ThreadPoolExecutor(len(lowered)) as pool:
    return Programs(*pool.map(lambda program: program.compile(), lowered))


def _train(
  chosen: Settings, programs: Programs, states: Any, batches: Iterator[Layout]
) -> tuple[Any, list, float]:
  """The trained states, lines of [step, loss of each seed], and tokens a second over all seeds."""
  curve, began, batch = [], 0.0, next(batches)
  total = chosen.total_steps
  for step in range(1, total + 1):
    states, metrics_s = programs.step(states, batch)
    batch = next(batches)  # built and sent while the device works
    if step == WARM_UP:
      jax.block_until_ready(metrics_s)
      began = time.monotonic()
    if step % max(1, total // REPORTED) == 0 or step == total:
      loss_s = [float(loss) for loss in metrics_s["loss"]]
      curve.append([step, *loss_s])
      print(
        f"step {step} of {total}: loss {', '.join(f'{loss:.4f}' for loss in loss_s)}", flush=True
      )
  jax.block_until_ready(states)
  tokens = (total - WARM_UP) * chosen.data.batch_rows * chosen.data.slots * SEEDS
  return states, curve, tokens / (time.monotonic() - began) if total > WARM_UP else 0.0
