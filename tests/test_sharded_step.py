"""A step with accumulation, recomputation and experts over devices is the step of one device.

Legend: B rows, E experts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.objective.denominators import count
from deepseek_jax.sharding import batch_sharding, make_mesh, state_shardings
from deepseek_jax.step import TrainState, init_state, make_train_step
from deepseek_jax.training_config import MeshConfig
from train.programs import training_loss

NANO = Settings.from_dict(nano.get_config().to_dict())
MODEL = dataclasses.replace(  # the last two layers are scanned
  NANO.model,
  remat="block",
  compress_ratios=(2, 1, 1, 1),
  kv_sources=(0, 1),
  index_sources=(0, 1, 2, 3),
  decoder_start=1,
  indexer=dataclasses.replace(NANO.model.indexer, pool_source=1),
  engram=dataclasses.replace(NANO.model.engram, layers=(), table_rows=()),
  moe=dataclasses.replace(NANO.model.moe, receive_factor=1.0),
)
SETTINGS = dataclasses.replace(NANO, model=MODEL)
MESH = MeshConfig(fsdp=2, expert=4)
B, MICRO_BATCHES = 16, 2
CROWDED = "layer_0"  # its tokens all go to the first two experts, on two of four devices


def batch():
  rng = np.random.default_rng(0)
  row = lambda number: build_layout(
    [Document(rng.integers(0, 256, n).astype(np.int32)) for n in (5 + number, 21, 9)],
    slots=NANO.data.slots,
    ratios=MODEL.ratios,
  )
  return stack_layouts([row(number) for number in range(B)])


def plain_descent():
  """Parameters move by the gradient, large enough that nothing of it is rounded away."""
  schedule = optax.constant_schedule(1e4)
  return optax.chain(optax.identity(), optax.scale_by_learning_rate(schedule)), schedule


def random_state(optimizer):
  def create():
    variables = nn.unbox(Model(MODEL).init(jax.random.key(0), batch()))
    balance = variables["balance"]
    crowd = {"bias": jnp.array([9.0, 9.0, 0.0, 0.0]), "bias_vl": jnp.zeros(MODEL.moe.experts)}
    return init_state(variables["params"], balance | {CROWDED: {"moe": crowd}}, optimizer)

  return jax.jit(create)()


def make_step(shardings=None):
  optimizer, schedule = plain_descent()
  return make_train_step(
    training_loss(SETTINGS),
    lambda layout: count(layout, MODEL),
    optimizer,
    schedule,
    bias_speed=0.001,
    micro_batches=MICRO_BATCHES,
    state_shardings=shardings,
  )


def run(step, state, layout):
  fast = {"xla_backend_optimization_level": 0}
  return step.lower(state, layout).compile(compiler_options=fast)(state, layout)


def shardings_of(state, mesh):
  boxed = state_shardings(jax.eval_shape(Model(MODEL).init, jax.random.key(0), batch()), mesh)
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  alone: TrainState = jax.tree.map(lambda _: everywhere, state)
  return alone._replace(params=boxed["params"], balance=boxed["balance"])


@pytest.mark.slow
def test_gradients_balance_and_metrics_agree_when_experts_take_several_rounds():
  state = random_state(plain_descent()[0])
  start = jax.tree.map(np.array, state)
  want, metrics_of_one = run(make_step(), state, batch())
  mesh = make_mesh(MESH)
  with jax.set_mesh(mesh):
    shardings = shardings_of(start, mesh)
    placed = jax.device_put((start, batch()), (shardings, batch_sharding(mesh)))
    got, metrics = run(make_step(shardings), *placed)

  assert metrics_of_one.pop("expert_rounds") == 1
  # Two of four devices get all tokens of one layer; loads of the others are near even.
  assert (2 + 3 * 1) / 4 <= metrics.pop("expert_rounds") <= 2
  for name, value in metrics_of_one.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
  leaves = lambda state: jax.tree.leaves(state.params)
  for w, g, old in zip(leaves(want), leaves(got), leaves(start), strict=True):
    moved = np.array(w) - old
    np.testing.assert_allclose(np.array(g) - old, moved, atol=1e-5 * np.abs(moved).max(), rtol=0)
  for w, g in zip(jax.tree.leaves(want.balance), jax.tree.leaves(got.balance), strict=True):
    np.testing.assert_array_equal(g, w)
