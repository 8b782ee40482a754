"""`python -m train plan`: what a configuration is and costs, without hardware and without a run.

plan.json: `parameters`, `activated_parameters`, `kv_bytes_per_token`, `prefill_ratio`,
`flops_per_token`, `indexer_imbalance` (of contiguous context shards at 1M tokens), `stages`;
`claims` for the released model; `compiled` with --topology, which is of the first stage.
"""

import dataclasses
import importlib.metadata
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from configs.schema import Settings
from deepseek_jax.config import ModelConfig, flash
from deepseek_jax.flops import activated_parameters, parameters
from deepseek_jax.sharding import MESH_AXES, slice_count
from train import (
  checks,
  plan_cache,
  plan_cost,
  plan_plot,
  plan_tables,
  plan_topology,
  settings,
  stage_table,
  stages,
)
from train.errors import Exit, UsageError
from train.optimizer_table import optimizer_table
from train.plan_claims import claims
from train.plan_parts import drafter_parameters, vision_parameters
from train.programs import parameter_shapes

USAGE = """python -m train plan --config FILE.py[:variant] [--config.KEY=VALUE ...]
                     [--topology NAME] [--output PLAN.json] [--plot FIGURE.png]

--topology  compile the training step for v5p:8x8x8, v6e:16x16, tpu7x:4x4x4, v5e:4x4 or h200:8 and
            report its memory and collectives; mesh.* must multiply to the number of devices;
            v5p:4x4x4*2 are two slices
--output    also write the numbers
--plot      also draw them (the plots extra)"""
ARGUMENTS = ("--config", "--topology", "--output", "--plot")


class Request(NamedTuple):
  settings: Settings
  config: str  # as given
  topology: plan_topology.Topology | None
  output: pathlib.Path | None
  plot: pathlib.Path | None


def main(argv: Sequence[str]) -> int:
  """Prints the plan. Returns 0; raises UsageError with every problem of the arguments."""
  if any(word in ("--help", "-h") for word in argv):
    print(USAGE)
    return Exit.DONE
  request = parse(argv)
  plan = make_plan(request.settings.model)
  run_stages = stages.resolve(request.settings)
  plan["stages"] = stage_table.numbers(run_stages)
  if request.topology is not None:
    plan["compiled"] = _compiled(request.settings, request.topology)
  plan_tables.show(plan)
  print(f"Stages of a run\n{stage_table.stage_table(run_stages)}\n")
  for stage in run_stages:
    if stage is run_stages[0] or stage.settings.optim.frozen:
      shapes = parameter_shapes(stage.settings)
      print(f"Optimizer, stage {stage.name}\n{optimizer_table(shapes, stage.settings)}\n")
  if request.output is not None:
    content = {"config": request.config, **plan}
    request.output.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
  if request.plot is not None:
    plan_plot.draw(request.settings.model, plan["flops_per_token"], run_stages, request.plot)
  return Exit.DONE


def make_plan(cfg: ModelConfig) -> dict[str, Any]:
  """Everything that arithmetic says about a model; contexts are in tokens."""
  plan = {
    "parameters": _parameters(cfg),
    "activated_parameters": activated_parameters(cfg),
    "kv_bytes_per_token": plan_cache.kv_bytes_per_token(cfg),
    "prefill_ratio": {n: plan_cost.prefill_ratio(cfg, n) for n in plan_cost.CONTEXTS},
    "flops_per_token": plan_cost.flops_table(cfg),
    "indexer_imbalance": {
      shards: plan_cost.indexer_imbalance(cfg, plan_cost.CONTEXTS[-1], shards)
      for shards in plan_cost.SHARDS
    },
  }
  if cfg.tree() == flash().tree():  # as it is served, whatever a stage switches off
    plan["claims"] = [claim._asdict() for claim in claims(flash())]
  return plan


def parse(argv: Sequence[str]) -> Request:
  """What the arguments mean. Raises UsageError with every problem."""
  values, overrides, problems, _ = settings.split(argv, ARGUMENTS, switches=())
  paths = {name: pathlib.Path(values[name]) for name in ("--output", "--plot") if name in values}
  problems += [
    f"{name} {path}: the folder {path.parent} does not exist."
    for name, path in paths.items()
    if not path.parent.is_dir()
  ]
  problems += [f"{name} {path} is a folder." for name, path in paths.items() if path.is_dir()]
  if "--plot" in paths and (problem := plan_plot.problem(paths["--plot"])):
    problems.append(problem)
  topology = values.get("--topology")
  if topology is not None and (problem := plan_topology.problem(topology)):
    problems.append(problem)
  if "--config" not in values:
    problems.append("--config is missing.")
  try:
    chosen = settings.load(values.get("--config"), overrides)
  except UsageError as error:
    raise UsageError([*problems, *error.problems]) from error
  target = plan_topology.open_topology(topology) if topology and not problems else None
  if "--config" in values:
    problems += _unsound(chosen, target)
  if problems:
    raise UsageError(problems)
  return Request(chosen, values["--config"], target, paths.get("--output"), paths.get("--plot"))


def _unsound(chosen: Settings, target: plan_topology.Topology | None) -> list[str]:
  """Problems of the configuration on these devices; without any, on as many as its mesh has."""
  devices, slices = math.prod(getattr(chosen.mesh, axis) for axis in MESH_AXES), 1
  if target is not None:
    devices, slices = len(target.devices), slice_count(target.devices)
  return checks.problems(chosen, devices=devices, slices=slices, reads_data=False)


def _parameters(cfg: ModelConfig) -> dict[str, int]:
  built, vision, drafter = parameters(cfg), vision_parameters(cfg), drafter_parameters(cfg)
  return {
    "backbone": built["backbone"] + vision,
    "vision": vision,
    "engram": built["engram"],
    "drafter": drafter,
    "total": built["total"] + vision + drafter,
    "in_training_state": built["total"],
  }


def _compiled(chosen: Settings, topology: plan_topology.Topology) -> dict[str, Any]:
  from train import plan_compile  # only now: it loads the libraries of a run

  compiled = plan_compile.compile_step(chosen, topology)
  compiler = "jax-cuda13-plugin" if topology.platform == "cuda" else "libtpu"
  return {
    "topology": topology.name,
    "mesh": dataclasses.asdict(chosen.mesh),
    "usable": plan_compile.USABLE,
    "versions": {package: importlib.metadata.version(package) for package in ("jax", compiler)},
    **compiled._asdict(),
  }
