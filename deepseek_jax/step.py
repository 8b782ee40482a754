"""One optimizer step, as a pure function of (state, batch). Legend: B rows, k micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from deepseek_jax.layout import Layout, real_slots
from deepseek_jax.objective.denominators import Denominators
from deepseek_jax.objective.health import health_metrics
from deepseek_jax.optim import parts, router_bias
from deepseek_jax.optim.optimizer import update_count
from deepseek_jax.optim.schedule import Schedule
from deepseek_jax.sharding import mesh_to_split
from deepseek_jax.types import LayerAux

# (params, balance, layout, denominators) -> (loss, (metrics, LayerAux of the layers, their health
# or None)), where loss and metrics are shares of the batch that `denominators` counted.
LossFn = Callable[..., tuple[jax.Array, tuple[dict[str, jax.Array], dict, Any]]]


class TrainState(NamedTuple):
  """Everything that training changes. A skipped step changes only the two counters."""

  step: jax.Array  # int32, batches taken, skipped ones included; tokens are counted by the caller
  params: Any  # float32 master weights
  balance: Any  # float32 router biases
  opt_state: optax.OptState  # holds the number of updates that the learning rate goes by
  skipped: jax.Array  # int32, steps skipped in a row, up to now


def init_state(params: Any, balance: Any, optimizer: optax.GradientTransformation) -> TrainState:
  zero = lambda: jnp.zeros((), jnp.int32)  # two buffers: donation does not take one twice
  return TrainState(zero(), params, balance, optimizer.init(params), zero())


def make_train_step(
  loss_fn: LossFn,
  count: Callable[[Layout], Denominators],
  optimizer: optax.GradientTransformation,
  schedule: Schedule,
  *,
  bias_speed: float,
  micro_batches: int = 1,
  state_shardings: TrainState | None = None,
) -> Callable[[TrainState, Layout], tuple[TrainState, dict[str, jax.Array]]]:
  """The compiled step. It consumes the state that it is given.

  Args:
    loss_fn: as LossFn describes.
    count: denominators of a whole batch.
    optimizer: see deepseek_jax.optim.optimizer.
    schedule: the optimizer's learning rate, for the metrics.
    bias_speed: change of the router biases per step.
    micro_batches: k, pieces that a batch is worked on in; k divides B.
    state_shardings: of the state that comes out; None leaves them to the compiler.

  Returns: step(state, batch) -> (state, metrics). Metrics are float32 or int32 scalars: "loss",
    "grad_norm" (before clipping), "lr", "tokens" (real slots), "loss_tokens" (sum of loss weights),
    "skipped" (in a row, so more than 0 when this step was), "router_imbalance", "expert_rounds"
    (mean over layers and micro-batches; 1 where all tokens reached their experts at once),
    loss_fn's, and where it gives health: those of objective/health.py and router_bias.condition,
    and norms of gradients and updates by part, the latter estimated (parts.sampled).
  """

  def train_step(state: TrainState, batch: Layout) -> tuple[TrainState, dict[str, jax.Array]]:
    denominators = count(batch)
    (loss, (metrics, layers, health)), grads = _accumulate(
      jax.value_and_grad(loss_fn, has_aux=True), state, batch, denominators, micro_batches
    )
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
      new = (
        optax.apply_updates(state.params, updates),
        router_bias.update(state.balance, layers, bias_speed),
        opt_state,
      )
      old = (state.params, state.balance, state.opt_state)
      params, balance, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    skipped = jnp.where(finite, 0, state.skipped + 1)
    metrics |= {
      "loss": loss,
      "grad_norm": grad_norm,
      "lr": schedule(update_count(state.opt_state)),
      "tokens": jnp.sum(real_slots(batch)),
      "loss_tokens": jnp.sum(batch.weights),
      "skipped": skipped,
      "router_imbalance": router_bias.imbalance(layers),
      "expert_rounds": _mean_rounds(layers) / micro_batches,
    }
    if health is not None:
      metrics |= health_metrics(health) | _norms(grads, "grad_norm")
      metrics |= _norms(parts.sampled(updates), "update_norm")
      metrics |= router_bias.condition(balance, layers)
    return TrainState(state.step + 1, params, balance, opt_state, skipped), metrics

  # Without shardings for its outputs XLA may return a state that has lost the axis it is split on.
  out_shardings = None if state_shardings is None else (state_shardings, None)
  return jax.jit(train_step, donate_argnums=0, out_shardings=out_shardings)


def _norms(tree: Any, name: str) -> dict[str, jax.Array]:
  return {f"{name}_{part}": norm for part, norm in parts.norms(tree).items()}


def _mean_rounds(layers: dict) -> jax.Array:
  reports = jax.tree.leaves(layers, is_leaf=lambda value: isinstance(value, LayerAux))
  return jnp.mean(jnp.concatenate([jnp.ravel(aux.rounds) for aux in reports]))


def _accumulate(
  value_and_grad: Callable, state: TrainState, batch: Layout, denominators: Denominators, k: int
):
  """Adds up value, metrics, layer reports and gradients over k pieces of the batch, in float32.

  Nothing is divided here: every piece is already a share of the whole batch.
  """
  if k == 1:
    return value_and_grad(state.params, state.balance, batch, denominators)
  value_and_grad = jax.jit(value_and_grad)  # so that it is traced once, not for its shapes as well
  # On a mesh behind a barrier: XLA would otherwise add up the gradients before it sums them over
  # devices, and hold whole gradients instead of each device's part. On one device the barrier would
  # hold every gradient of a piece beside the sums.
  hold = jax.lax.optimization_barrier if mesh_to_split() is not None else lambda x: x
  piece = lambda layout: hold(value_and_grad(state.params, state.balance, layout, denominators))
  pieces = jax.tree.map(lambda x_B: _split_rows(x_B, k), batch)
  shapes = jax.eval_shape(piece, jax.tree.map(lambda x_kB: x_kB[0], pieces))
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
  add = lambda total, layout: (jax.tree.map(jnp.add, total, piece(layout)), None)
  return jax.lax.scan(add, zeros, pieces)[0]


def _split_rows(x_B: jax.Array, k: int) -> jax.Array:
  """[B, ...] -> [k, B/k, ...]. Piece i holds rows i, i + k, ..., so every device has its part."""
  rows = len(x_B)
  if rows % k:
    raise ValueError(f"micro_batches is {k}, which does not divide the {rows} rows of a batch.")
  return jnp.moveaxis(x_B.reshape(rows // k, k, *x_B.shape[1:]), 1, 0)
