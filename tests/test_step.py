"""The step on a linear stand-in for the model, with every term of the loss and both nestings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.config import ModelConfig
from deepseek_jax.layout import TEXT, Document, build_layout, real_slots, stack_layouts
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.pretrain import make_loss_fn
from deepseek_jax.optim.optimizer import make_optimizer, update_count
from deepseek_jax.optim.schedule import Span, learning_rate
from deepseek_jax.step import init_state, make_train_step
from deepseek_jax.training_config import ObjectiveConfig, OptimConfig
from deepseek_jax.types import LayerAux, ModelOutput

VOCAB, DIM, EXPERTS = 11, 4, 5
CFG = ModelConfig(
  compress_ratios=(2, 1, 1), kv_sources=(0, 1), index_sources=(0, 1, 2), decoder_start=1
)
OBJECTIVE = ObjectiveConfig(balance_weight=0.25, indexer_weight=0.5, vocab_chunk_tokens=7)
OPTIM = OptimConfig(peak_lr=0.05, warmup_steps=2, final_lr=0.005, decay_begin=None, decay_end=None)
TOTAL_STEPS = 20
SPANS = [Span(TOTAL_STEPS, 8 * 16)]
OVERFLOW, NO_GRADIENT = 9, 10  # token ids that make the loss, or only its gradient, not finite


def linear_model(variables, layout):
  """What a model reports, linear in its embedding; the experts are the token ids modulo E."""
  params, biases = variables["params"], variables["balance"]
  x_BSD = params["embed"][layout.tokens] @ params["layer_0"]["attn"]["wkv"]
  real_BS = real_slots(layout)
  routed_BSE = jax.nn.one_hot(layout.tokens % EXPERTS, EXPERTS) * real_BS[..., None]
  text_BS = (layout.modality == TEXT)[..., None]
  score_BS = jnp.square(x_BSD @ params["layers_1_2"]["layer_0"]["moe"]["gate"][0, :, 0]) * real_BS

  def aux(scale):
    row_length = jnp.maximum(real_BS.sum(1), 1)
    balance = jnp.sum(jnp.square(score_BS.sum(1) / row_length))
    sees = {m: layout.entry_end[m] > layout.entry_begin[m] for m in (1, 2)}
    return LayerAux(
      load_text_E=jnp.sum(routed_BSE * text_BS, (0, 1)),
      load_vision_E=jnp.sum(routed_BSE * ~text_BS, (0, 1)),
      balance=scale * balance,
      indexer_kl=scale * jnp.sum(score_BS * sees[2 if scale == 1 else 1]),
      rounds=jnp.float32(scale),  # 2 on average, whatever the number of pieces
    )

  hidden_BTD = x_BSD + sum(b.sum() for b in jax.tree.leaves(biases))
  bad = lambda token: jnp.any(layout.tokens == token)
  hidden_BTD = hidden_BTD * jnp.where(bad(OVERFLOW), jnp.inf, 1.0)
  root = lambda x: jnp.sqrt(jnp.square(x - jax.lax.stop_gradient(x)))  # 0, with gradient 0 / 0
  hidden_BTD = hidden_BTD + jax.lax.cond(bad(NO_GRADIENT), root, jnp.zeros_like, x_BSD)
  stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), aux(2), aux(3))
  return ModelOutput(
    hidden_BTD, params["head"], {"layer_0": aux(1), "layers_1_2": {"layer_0": stacked}}
  )


def new_state(optimizer):
  keys = jax.random.split(jax.random.key(1), 4)
  normal = lambda key, shape: 0.3 * jax.random.normal(key, shape)
  params = {
    "embed": normal(keys[0], (VOCAB, DIM)),
    "head": normal(keys[1], (VOCAB, DIM)),
    "layer_0": {"attn": {"wkv": normal(keys[2], (DIM, DIM))}},
    "layers_1_2": {"layer_0": {"moe": {"gate": normal(keys[3], (2, DIM, 1))}}},
  }
  bias = lambda *shape: {"moe": {"bias": jnp.zeros(shape), "bias_vl": jnp.zeros(shape)}}
  balance = {"layer_0": bias(EXPERTS), "layers_1_2": {"layer_0": bias(2, EXPERTS)}}
  return init_state(params, balance, optimizer)


def make(micro_batches=1, bias_speed=0.001, **options):
  optimizer = make_optimizer(OPTIM, SPANS, CFG.engram)
  step = make_train_step(
    make_loss_fn(linear_model, OBJECTIVE, "float32"),
    lambda layout: count(layout, CFG),
    optimizer,
    learning_rate(OPTIM, SPANS),
    bias_speed=bias_speed,
    micro_batches=micro_batches,
    **options,
  )
  return step, new_state(optimizer)


def batch(*rows, tokens=8, seed=0):
  generator = np.random.default_rng(seed)

  def document(length):
    modality = np.full(length, TEXT, np.int32)
    modality[length // 2 :] = 1 if length > 6 else TEXT
    return Document(generator.integers(0, tokens, length, np.int32), modality=modality)

  return stack_layouts(
    [build_layout([document(n) for n in row], slots=16, ratios=(1, 2), align=2) for row in rows]
  )


UNEVEN = batch((16,), (1,), (), (3, 4), (9,), (2,), (5, 1, 1), (13,))


def assert_trees_close(got, want, rtol):
  for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(g, w, rtol=rtol, atol=1e-7, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_accumulated_pieces_equal_one_batch_whatever_their_token_counts(micro_batches):
  whole, state = make()
  pieces, same_state = make(micro_batches)
  for _ in range(3):
    state, metrics = whole(state, UNEVEN)
    same_state, same_metrics = pieces(same_state, UNEVEN)
    assert_trees_close(same_metrics, metrics, rtol=1e-5)
  assert_trees_close(same_state, state, rtol=1e-4)


def test_loss_falls_and_metrics_describe_the_batch():
  step, state = make()
  losses = []
  for _ in range(TOTAL_STEPS):
    state, metrics = step(state, UNEVEN)
    losses.append(float(metrics["loss"]))
  assert losses[-1] < losses[0] - 0.1
  assert metrics["tokens"] == 16 + 1 + 0 + 7 + 9 + 2 + 7 + 13
  assert metrics["expert_rounds"] == 2
  assert metrics["loss_tokens"] == 15 + 0 + 0 + 5 + 8 + 1 + 4 + 12
  assert metrics["skipped"] == 0 and state.step == update_count(state.opt_state) == TOTAL_STEPS
  np.testing.assert_allclose(metrics["lr"], OPTIM.final_lr, rtol=1e-5)
  assert all(m.ndim == 0 for m in metrics.values())


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("token", [OVERFLOW, NO_GRADIENT])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(token, micro_batches):
  step, state = make(micro_batches)
  state, _ = step(state, UNEVEN)
  kept = jax.tree.map(np.array, (state.params, state.balance, state.opt_state))
  tokens = UNEVEN.tokens.copy()
  tokens[3, 0] = token
  bad = UNEVEN._replace(tokens=tokens)
  for times in (1, 2):
    state, metrics = step(state, bad)
    assert metrics["skipped"] == state.skipped == times
    assert np.isfinite(metrics["loss"]) == (token == NO_GRADIENT)
  jax.tree.map(np.testing.assert_array_equal, (state.params, state.balance, state.opt_state), kept)
  assert state.step == 3 and update_count(state.opt_state) == 1

  state, metrics = step(state, UNEVEN)
  assert metrics["skipped"] == state.skipped == 0
  assert update_count(state.opt_state) == 2
  assert np.any(state.params["embed"] != kept[0]["embed"])


def test_router_biases_follow_the_load_of_the_whole_batch_once_per_step():
  """Expert 0 is over the mean in either half alone, expert 1 only in one: the sum decides."""
  first, second = np.array([0] * 6 + [1] * 4 + [2]), np.array([0] * 6 + [3] * 4 + [2])
  rows = [
    build_layout([Document(tokens.astype(np.int32))], slots=16, ratios=(1, 2))
    for tokens in (first, second)
  ]
  step, state = make(micro_batches=2)
  state, metrics = step(state, stack_layouts(rows))
  load = np.bincount(np.concatenate([first, second]), minlength=EXPERTS)
  moved = 0.001 * np.sign(load.mean() - load)
  wanted = moved - moved.mean()
  np.testing.assert_allclose(state.balance["layer_0"]["moe"]["bias"], wanted, rtol=1e-5)
  group = state.balance["layers_1_2"]["layer_0"]["moe"]
  np.testing.assert_allclose(group["bias"], [wanted, wanted], rtol=1e-5)
  np.testing.assert_array_equal(group["bias_vl"], np.zeros((2, EXPERTS)))
  assert metrics["router_imbalance"] == pytest.approx(load.max() / load.mean())


def test_padding_alone_has_loss_zero_and_is_no_error():
  step, state = make()
  _, metrics = step(state, batch((), ()))
  assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == metrics["skipped"] == 0


def test_the_state_is_consumed_and_comes_back_with_the_given_shardings():
  mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  _, state = make()
  shardings = jax.tree.map(lambda x: sharding if x.ndim == 2 else replicated, state)
  step, state = make(state_shardings=shardings)
  given = jax.device_put(state, shardings)
  state, _ = step(given, UNEVEN)
  assert given.params["embed"].is_deleted()
  assert state.params["embed"].sharding == sharding
  momentum = state.opt_state[1].inner_states["embedding"].inner_state[0][1].trace
  assert momentum["embed"].sharding == sharding


def test_pieces_that_do_not_divide_the_batch_are_refused_in_one_sentence():
  step, state = make(micro_batches=3)
  with pytest.raises(ValueError, match="micro_batches is 3, which does not divide the 8 rows"):
    step(state, UNEVEN)
