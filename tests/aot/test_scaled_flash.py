"""The release's structure, narrow, compiled for 64 v5p chips in one slice and in two; not run."""

import pytest

from configs import flash
from configs.schema import Settings
from deepseek_jax.ngram import hash_primes
from deepseek_jax.sharding import slice_count
from train import checks, plan_topology
from train.plan_compile import compile_step

pytestmark = pytest.mark.slow


def scaled_flash(**mesh: int) -> Settings:
  """Every group of the release's scan plan in its order and with its repetitions, but shorter.

  0 | 1 | 2-3 | 4 | 5 | 6-13: window only, the same with a table, two sources, a source with a
  table, the decoder's source, and four groups that choose again.
  """
  config = flash.get_config()
  model = config.model
  model.update(dim=256, vocab=2048, decoder_start=5, compress_ratios=(0, 0) + (2,) * 3 + (1,) * 9)
  model.update(kv_sources=(2, 3, 4, 5), index_sources=(2, 3, 4, 5, 6, 8, 10, 12))
  model.attention.update(heads=8, head_dim=64, rope_dim=16, q_rank=64, o_rank=32, o_groups=4)
  model.attention.window = 32
  model.indexer.update(heads=8, head_dim=32, top_k=32)
  model.moe.update(experts=32, hidden=128)
  model.engram.update(layers=(1, 4), heads=2, head_dim=32, prime_start=10_007)
  model.engram.table_rows = tuple(sum(primes) for primes in hash_primes(2, 6, 10_007))
  config.data.update(slots=1024, batch_rows=32)
  config.mesh.update(**mesh)
  config.accumulation = 2
  config.stages = ()
  return Settings.from_dict(config.to_dict())


def test_the_scaled_model_has_the_plan_of_the_release():
  shape = lambda settings: [
    (group.repeat, group.layers[0].kind, group.layers[0].pool, group.layers[0].engram)
    for group in settings.model.scan_plan()
  ]
  assert shape(scaled_flash()) == shape(Settings.from_dict(flash.get_config().to_dict()))


@pytest.mark.parametrize(
  ("topology", "mesh"),
  [
    ("v5p:4x4x4", {"fsdp": 2, "expert": 8, "context": 4}),
    ("v5p:4x4x2*2", {"replica": 2, "expert": 8, "context": 4}),
  ],
)
def test_the_step_fits_on_64_chips_and_exchanges_tokens_halos_and_weights(topology, mesh):
  pytest.importorskip("libtpu")
  target, settings = plan_topology.open_topology(topology), scaled_flash(**mesh)
  devices, slices = len(target.devices), slice_count(target.devices)
  problems = checks.problems(settings, devices=devices, slices=slices, reads_data=False)
  assert devices == 64 and problems == []
  compiled = compile_step(settings, target)
  assert compiled.fits, compiled
  # Weights are gathered, their gradients scattered, tokens go to experts, windows get halos.
  sent = {"all-gather", "reduce-scatter", "ragged-all-to-all", "collective-permute"}
  assert sent <= compiled.collectives.keys()
