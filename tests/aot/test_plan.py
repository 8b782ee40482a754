"""The training step that `plan --topology` compiles for machines that are not here; not run."""

import json

import pytest

from deepseek_jax.ngram import hash_primes
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
from train import plan, plan_topology
from train.errors import UsageError

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


@pytest.mark.parametrize(
  "sizes",
  [
    {"fsdp": 16, "expert": 32},
    {"expert": 64, "context": 8},
    {"replica": 2, "fsdp": 4, "expert": 8, "context": 8},
    {"fsdp": 512},
  ],
  ids=str,
)
def test_any_mesh_of_all_chips_lies_on_the_torus(sizes):
  pytest.importorskip("libtpu")
  mesh = make_mesh(MeshConfig(**sizes), plan_topology.open_topology("v5p:8x8x8").devices)
  assert len({device.id for device in mesh.devices.flat}) == 512
  if mesh.shape["context"] == 8:  # the last axis takes a whole side: its chips are a ring
    ring = [device.coords for device in mesh.devices[0, 0, 0, :, 0]]
    assert sum(len({place[side] for place in ring}) == 8 for side in range(3)) == 1


def test_replicas_lie_in_whole_slices():
  pytest.importorskip("libtpu")
  devices = plan_topology.open_topology("v5p:2x2x1*2").devices
  mesh = make_mesh(MeshConfig(replica=4, expert=2), devices)
  slices = [{device.slice_index for device in replica.flat} for replica in mesh.devices]
  assert slices == [{0}, {0}, {1}, {1}]
  words = ["--config=configs/nano.py", "--config.data.batch_rows=8", "--topology=v5p:2x2x1*2"]
  with pytest.raises(UsageError) as error:
    plan.parse([*words, "--config.mesh.fsdp=8"])
  assert list(error.value.problems) == [
    "mesh.replica is 1, which 2 slices do not divide; only replicas may lie in several slices. "
    "--config.mesh.fsdp=4 --config.mesh.replica=2 would fit."
  ]
