"""What `plan` says about the release, against published figures and against sums done by hand."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax import flops
from deepseek_jax.config import flash
from deepseek_jax.model import Model
from train import plan, plan_cache, plan_cost
from train.batches import empty_row
from train.errors import UsageError
from train.plan_claims import claims

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLASH = flash()
NANO = Settings.from_dict(nano.get_config().to_dict())
STATED = claims(FLASH)


@pytest.fixture(scope="module")
def released():
  return plan.make_plan(FLASH)


def run(*words):
  command = [sys.executable, "-m", "train", "plan", *map(str, words)]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def problems_of(*words):
  with pytest.raises(UsageError) as error:
    plan.parse(words)
  return error.value.problems


def test_parameters_of_the_release_are_the_published_ones(released):
  # model.md section 1.6; in training are neither the vision tower nor the drafter yet
  assert released["parameters"] == {
    "backbone": 552_366_103_664,
    "vision": 485_268_480,
    "engram": 196_613_849_600,
    "drafter": 14_225_362_530,
    "total": 763_205_315_794,
    "in_training_state": 748_494_684_784,
  }


def test_parameters_in_training_are_those_of_the_models_own_shapes():
  model = Model(NANO.model)
  init = lambda key: nn.unbox(model.init(key, empty_row(NANO)))
  shapes = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
  counted = plan.make_plan(NANO.model)["parameters"]
  engram = NANO.model.engram
  padding = (sum(engram.stored_rows) - sum(engram.table_rows)) * engram.head_dim
  assert counted["in_training_state"] == sum(math.prod(leaf.shape) for leaf in shapes) - padding
  assert counted["total"] == counted["backbone"] + counted["engram"] + counted["drafter"]


def test_cache_sizes_of_the_release_are_those_of_its_records(released):
  main, indexer = 512 // 2 + 512 // 16, 128 // 2 + 128 // 32
  assert released["kv_bytes_per_token"] == {
    "main": 3 * main / 2 + main,
    "indexer": 3 * indexer / 2 + indexer,
    "global": 890,
    "window_per_layer": 528,
  }


def test_the_ladder_comes_down_step_by_step_as_published():
  steps = list(plan_cache.ladder(FLASH).values())
  assert steps == [21 * (584 + 68) / 4 + 20 * 584 / 128, 4 * 652 / 4, 652 * 2.5, 356 * 2.5]


def test_prefill_passes_half_the_layers_and_a_window(released):
  assert released["prefill_ratio"] == {n: 1 / 2 + 64 / n for n in plan_cost.CONTEXTS}
  assert plan_cost.prefill_ratio(FLASH, 50) == 1
  one_stack = dataclasses.replace(FLASH, decoder_start=None)
  assert plan_cost.prefill_ratio(one_stack, 4096) == 1


@pytest.mark.parametrize("claim", STATED, ids=[claim.quantity for claim in STATED])
def test_a_published_figure_is_reproduced(claim):
  assert claim.holds, claim


def test_another_model_does_not_have_the_published_figures():
  other = dataclasses.replace(FLASH, compress_ratios=(0, 0) + (4,) * 18 + (1,) * 20)
  failing = {claim.quantity for claim in claims(other) if not claim.holds}
  assert "bytes a token, main entries in FP4" in failing
  assert "claims" not in plan.make_plan(NANO.model)


@pytest.mark.parametrize("context", [1, 999, 40_000])
def test_decode_flops_by_precision_add_up_to_all_of_them(context):
  parts = flops.decode_flops_by_precision(FLASH, context)
  assert sum(parts.values()) == pytest.approx(flops.flops_per_token(FLASH, "decode", context))
  scans = 3 * (context // 2) + context + 4 * min(context, 16_384)
  assert parts["fp4"] == 2 * 32 * 128 * scans


def test_products_in_fp8_are_the_linears_that_the_release_keeps_in_fp8():
  attention = 5120 * (1280 + 512) + 1280 * 32_768 + 8192 * 5120  # wq_a, wkv, wq_b, wo_b
  experts = 7 * 3 * 5120 * 2304
  others = 2 * 6144 * 25_600 + 8 * 1280 * 4096  # Engram wkv, indexer wq_b
  parts = flops.decode_flops_by_precision(FLASH, 4096)
  assert parts["fp8"] == 2 * (40 * (attention + experts) + others)


def test_numbers_reach_the_file_and_the_screen(tmp_path):
  output = tmp_path / "plan.json"
  done = run("--config=configs/flash.py", "--output", output)
  assert done.returncode == 0, done.stderr
  written = json.loads(output.read_text())
  assert written["parameters"]["backbone"] == 552_366_103_664
  assert {*written["flops_per_token"]} == {"train", "prefill", "decode"}
  assert written["prefill_ratio"].keys() == {str(2**power) for power in range(12, 21)}
  assert "compiled" not in written
  start, long = written["stages"]
  assert (start["last_step"] + 1, long["slots"], pytest.approx(long["lr"][0])) == (
    long["first_step"],
    2**20,
    2.6e-5,
  )
  assert "2,560 x [512, 1280]" in done.stdout  # heads of query projections, by Muon
  assert "552,366,103,664" in done.stdout and "DIFFERS" not in done.stdout


def test_wrong_usage_is_sentences_and_exit_code_2():
  done = run("--config=configs/nanoo.py", "--topologgy", "v5p:2x2x1")
  assert done.returncode == 2
  assert done.stderr.splitlines() == [
    "--topologgy is not an argument; the nearest is --topology.",
    "--config names configs/nanoo.py, which does not exist; configs/ has ablation.py, flash.py, "
    "nano.py, sft.py, small.py, tiny.py.",
  ]


def test_every_problem_of_the_arguments_is_named_at_once():
  words = ["--config.model.dimm=3", "--topology=v5q:2x2", "--output=/nowhere/x.json", "--plot"]
  output, topology, *rest = problems_of(*words)[1:]
  assert problems_of(*words)[0] == "--plot needs a value."
  assert output == "--output /nowhere/x.json: the folder /nowhere does not exist."
  assert topology.startswith("--topology v5q:2x2: accepted are chips v5e, v5p, v6e, tpu7x, h200")
  assert rest == [
    "--config is missing.",
    "model.dimm is not a configuration key; the nearest is model.dim.",
  ]


@pytest.mark.parametrize("name", ["v5p:8x8", "v6e:4x4x4", "h200:2x2", "v5p:0x2x2", "h200:8*2"])
def test_a_topology_of_the_wrong_shape_is_refused(name):
  (problem,) = problems_of("--config=configs/nano.py", f"--topology={name}")
  assert problem.startswith(f"--topology {name}: {name.partition(':')[0]} takes a shape as in ")


def test_an_unsound_configuration_is_refused_but_data_is_not_asked_for():
  assert plan.parse(["--config=configs/nano.py"]).settings == NANO
  (problem,) = problems_of("--config=configs/nano.py", "--config.data.batch_rows=3",
                           "--config.mesh.fsdp=2")  # fmt: skip
  assert problem.startswith("data.batch_rows (3) must be a multiple of")


def test_a_figure_is_drawn_or_the_missing_package_named(tmp_path):
  words = ["--config=configs/nano.py", f"--plot={tmp_path / 'plan.png'}"]
  try:
    import matplotlib  # noqa: F401
  except ModuleNotFoundError:
    (problem,) = problems_of(*words)
    assert "matplotlib, which is not installed" in problem
    return
  assert plan.main(words) == 0
  assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
  (problem,) = problems_of("--config=configs/nano.py", "--plot=plan.docx")
  assert "the name must end in one of" in problem


def test_the_last_context_shard_scores_most_and_a_pool_evens_it_out():
  """Without a pool the i-th of c shards scores 2i - 1 of c^2 parts; the last has 2 - 1/c means."""
  no_pool = dataclasses.replace(FLASH.indexer, pool_source=None)
  unrestricted = dataclasses.replace(FLASH, indexer=no_pool)
  imbalance = plan_cost.indexer_imbalance
  assert imbalance(unrestricted, 2**20, 8) == pytest.approx(2 - 1 / 8, abs=1e-4)
  # Its four Reindex layers score no more than the 16,384 members of the pool, wherever they are.
  assert 1.8 < imbalance(FLASH, 2**20, 8) < 2 - 1 / 8
