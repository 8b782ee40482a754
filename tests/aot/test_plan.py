"""The training step that `plan --topology` compiles for machines that are not here; not run."""

import json

import pytest

from configs import flash
from configs.schema import Settings
from deepseek_jax.ngram import hash_primes
from train import plan, plan_topology
from train.errors import UsageError
from train.plan_compile import lay_mesh

pytestmark = pytest.mark.slow


THREE_LAYERS = [
  "--config=configs/nano.py",
  "--config.model.compress_ratios=(0,2,1)",
  "--config.model.kv_sources=(1,2)",
  "--config.model.index_sources=(1,2)",
  "--config.model.decoder_start=2",
  "--config.model.indexer.pool_source=2",
  "--config.model.engram.layers=1",
  f"--config.model.engram.table_rows={sum(hash_primes(1, 4, 101)[0])}",
]


def test_a_small_step_compiles_for_four_tpu_chips_and_its_sizes_are_reported(tmp_path):
  pytest.importorskip("libtpu")
  output = tmp_path / "plan.json"
  mesh = ["--config.mesh.fsdp=2", "--config.mesh.expert=2", "--topology=v5p:2x2x1"]
  assert plan.main([*THREE_LAYERS, *mesh, f"--output={output}"]) == 0
  written = json.loads(output.read_text())
  compiled = written["compiled"]
  assert compiled["devices"] == 4 and compiled["fits"]
  assert compiled["compile_seconds"] > 0
  # Masters and two moments in float32, split over at most four devices; tiles pad small arrays.
  weights = written["parameters"]["in_training_state"] * 4
  assert 3 * weights / 4 < compiled["argument_bytes"] < 8 * weights
  assert 0 < compiled["temporary_bytes"] < compiled["memory_bytes"]
  assert compiled["collectives"]["all-reduce"]["count"] > 0


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["--config.mesh.fsdp=3"], r"--config.mesh.fsdp=4 would fit"),
    (["--topology=v5p:3x3x3"], r"is not one that the compiler knows"),
  ],
)
def test_a_mesh_or_slice_that_cannot_be_is_a_sentence(words, message):
  pytest.importorskip("libtpu")
  rows = "--config.data.batch_rows=12"
  with pytest.raises(UsageError, match=message):
    plan.main(["--config=configs/nano.py", rows, "--topology=v5p:2x2x1", *words])


def test_a_suggested_mesh_lies_on_the_links_of_the_slice():
  pytest.importorskip("libtpu")
  topology = plan_topology.open_topology("v5p:8x8x8")
  config = flash.get_config()
  config.mesh.update(fsdp=16, expert=32)
  with pytest.raises(UsageError, match="--config.mesh.fsdp=512 --config.mesh.expert=1 would fit"):
    lay_mesh(Settings.from_dict(config.to_dict()), topology)
  config.mesh.update(fsdp=64, expert=1, context=8)
  assert lay_mesh(Settings.from_dict(config.to_dict()), topology).size == 512
