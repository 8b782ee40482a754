"""What a run compiles, described by shapes before any array exists.

Legend: B rows, T decoder slots.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import Settings
from deepseek_jax.layout import Layout
from deepseek_jax.model import Model
from deepseek_jax.nn.health import COLLECTION
from deepseek_jax.objective.denominators import Denominators, count
from deepseek_jax.objective.pretrain import make_loss_fn
from deepseek_jax.ops.cross_entropy import linear_token_nll
from deepseek_jax.optim import low_rank
from deepseek_jax.optim.frozen import frozen_names, without_gradient
from deepseek_jax.optim.optimizer import like_parameters, make_optimizer
from deepseek_jax.optim.schedule import Span, learning_rate
from deepseek_jax.sharding import state_shardings
from deepseek_jax.step import LossFn, TrainState, init_state, make_train_step
from deepseek_jax.types import ModelOutput
from train import stages
from train.batches import abstract_batch, empty_row


class Programs(NamedTuple):
  """Shapes carry the shardings of the mesh; call and compile under `jax.set_mesh` of it."""

  abstract_state: TrainState
  abstract_batch: Layout
  create: Any  # jitted, () -> state: random weights, the same on every mesh
  start: Any  # jitted (weights, balance) -> state that has taken no step; consumes them
  step: Any  # jitted (state, batch) -> (state, metrics); consumes the state
  evaluate: Callable[[Any, Any, Layout], tuple[jax.Array, jax.Array]]  # see `loss_sums`


def build_programs(settings: Settings, mesh: Mesh, spans: Sequence[Span] | None = None) -> Programs:
  """The programs of pretraining; nothing is compiled yet and no array is allocated.

  Args:
    settings: of the run, or of one of its stages.
    mesh: that it works on.
    spans: updates of the whole run, where the settings are those of one stage.
  """
  spans = stages.spans(settings) if spans is None else spans
  model = _trained_model(settings)
  optimizer = make_optimizer(settings.optim, spans, settings.model.engram)
  row, key = empty_row(settings), jax.random.key(settings.seed)

  init = jax.jit(model.init)  # so that it is traced once, for its shapes and inside `create`

  def create() -> TrainState:
    variables = nn.unbox(init(key, row))
    return start(variables["params"], variables["balance"])

  def start(weights: Any, balance: Any) -> TrainState:
    params = low_rank.with_factors(weights, settings.optim.low_rank, key)
    return init_state(params, balance, optimizer)

  boxed, shapes = jax.eval_shape(init, key, row), jax.eval_shape(create)
  boxed |= {"params": low_rank.with_boxes(boxed["params"], settings.optim.low_rank)}
  shardings = _shardings(boxed, shapes, mesh)
  step = make_train_step(
    training_loss(settings),
    lambda layout: count(layout, settings.model),
    optimizer,
    learning_rate(settings.optim, spans),
    bias_speed=settings.optim.bias_speed,
    micro_batches=settings.accumulation,
    state_shardings=shardings,
  )
  return Programs(
    abstract_state=jax.tree.map(_struct, shapes, shardings),
    abstract_batch=abstract_batch(settings, mesh),
    create=jax.jit(create, out_shardings=shardings),
    start=jax.jit(start, out_shardings=shardings, donate_argnums=(0, 1)),
    step=step,
    evaluate=jax.jit(loss_sums(settings)),
  )


def parameter_shapes(settings: Settings) -> Any:
  """Shapes of the parameters, without a mesh."""
  key = jax.random.key(0)
  weights = lambda: nn.unbox(_trained_model(settings).init(key, empty_row(settings)))["params"]
  return jax.eval_shape(lambda: low_rank.with_factors(weights(), settings.optim.low_rank, key))


def training_loss(settings: Settings) -> LossFn:
  """The loss that a step follows, with its metrics, as LossFn describes.

  Parameters that are frozen have a gradient of exactly 0; weights with factors are merged first.
  """
  numerics, queries = settings.model.numerics, settings.log.observed_queries
  model = _trained_model(settings, queries)

  def apply(variables: Any, layout: Layout) -> ModelOutput:
    output, left = model.apply(variables, layout, mutable=[COLLECTION])
    return output._replace(health=left[COLLECTION])

  watched = apply if queries else _apply(model)
  of_all = make_loss_fn(watched, settings.objective, numerics.compute_dtype)
  optim = settings.optim

  def loss_fn(params: Any, balance: Any, layout: Layout, denominators: Denominators):
    weights = low_rank.merged(without_gradient(params, frozen_names(optim)), optim.low_rank)
    return of_all(weights, balance, layout, denominators)

  return loss_fn


def hidden_states(settings: Settings) -> Callable[[Any, Any, Layout], ModelOutput]:
  """(params, balance, layout) -> output of the model without losses of its layers.

  Takes weights, and weights with factors.
  """
  apply = _apply(Model(settings.model))

  def run(params: Any, balance: Any, layout: Layout) -> ModelOutput:
    weights = low_rank.merged(params, settings.optim.low_rank)
    return apply({"params": weights, "balance": balance}, layout)

  return run


def loss_sums(settings: Settings) -> Callable:
  """(params, balance, layout) -> float32 scalars: nats and loss weights, summed over the layout."""
  hidden = hidden_states(settings)

  def evaluate(params: Any, balance: Any, layout: Layout) -> tuple[jax.Array, jax.Array]:
    output = hidden(params, balance, layout)
    nll_BT = linear_token_nll(
      output.hidden_BTD,
      output.head_VD,
      layout.targets,
      chunk_tokens=settings.objective.vocab_chunk_tokens,
      compute_dtype=settings.model.numerics.compute_dtype,
    )
    return jnp.sum(layout.weights * nll_BT), jnp.sum(layout.weights)

  return evaluate


def _trained_model(settings: Settings, observed_queries: int = 0) -> Model:
  return Model(
    settings.model,
    indexer_loss=settings.objective.indexer,
    observed_queries=observed_queries,
  )


def _apply(model: Model) -> Callable[..., ModelOutput]:
  """`model.apply`, whose declared type has the mutable collections that we do not use."""
  return cast(Callable[..., ModelOutput], model.apply)


def _shardings(boxed: Any, shapes: TrainState, mesh: Mesh) -> TrainState:
  """Moments lie on the mesh like their parameters; counters are replicated."""
  variables = state_shardings(boxed, mesh)
  everywhere = NamedSharding(mesh, PartitionSpec())
  opt_state = like_parameters(shapes.opt_state, variables["params"], everywhere)
  return TrainState._make(
    (everywhere, variables["params"], variables["balance"], opt_state, everywhere)
  )


def _struct(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
