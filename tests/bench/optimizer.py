"""Seconds that a configuration's optimizer takes for one update, on random weights and gradients.

  python -m tests.bench optimizer --config configs/small.py [--config.KEY=VALUE ...] [--steps 10]
      [--json F]

An update costs the same however many tokens its gradient is the sum of, so this is measured
without a model; `tests.bench step` says what the tokens cost. On one device.
"""

import sys
import time
from typing import Any

import jax
import optax

from configs.schema import Settings
from deepseek_jax.optim.optimizer import make_optimizer
from tests.bench import document, measure
from train import stages
from train.errors import UsageError
from train.programs import parameter_shapes

ARGUMENTS = ("--config", "--steps", "--json")
_WEIGHT, _GRADIENT = 0.02, 1e-3  # standard deviations; neither changes the work


def main(words: list[str]) -> int:
  settings, arguments = document.read(words, ARGUMENTS)
  steps = int(arguments.values.get("--steps", "10"))
  if steps < 1:
    raise UsageError([f"--steps is {steps}, accepted is 1 or more."])
  document.write("optimizer", arguments, run(settings, steps))
  return 0


def run(settings: Settings, steps: int) -> dict[str, Any]:
  """Takes so many updates, queued and awaited together."""
  shapes = parameter_shapes(settings)
  optimizer = make_optimizer(settings.optim, stages.spans(settings), settings.model.engram)
  update = compiled(optimizer, shapes)
  params, grads = (
    measure.random_tree(shapes, deviation, n) for n, deviation in enumerate((_WEIGHT, _GRADIENT))
  )
  state = jax.jit(optimizer.init)(params)
  state_bytes = sum(x.nbytes for x in jax.tree.leaves((params, state)))
  params, state = jax.block_until_ready(update(params, state, grads))
  began = time.perf_counter()
  for _ in range(steps):
    params, state = update(params, state, grads)
  jax.block_until_ready(params)
  seconds = (time.perf_counter() - began) / steps
  return {
    "device": jax.devices()[0].device_kind,
    "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
    "state_bytes": state_bytes,
    "seconds": seconds,
    "memory": measure.memory(update) | {"device_peak_bytes": measure.device_peak_bytes()},
  }


def compiled(optimizer: optax.GradientTransformation, shapes: Any) -> Any:
  """(params, state, grads) -> (params, state), which consumes the first two."""

  def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  began = time.perf_counter()
  abstract_state = jax.eval_shape(optimizer.init, shapes)
  program = jax.jit(update, donate_argnums=(0, 1)).lower(shapes, abstract_state, shapes).compile()
  print(f"Compiled in {time.perf_counter() - began:.1f} s.", file=sys.stderr, flush=True)
  return program
