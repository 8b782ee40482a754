"""The training step, to be read: one device, no restart. train/loop.py is the one that runs.

  python -m train.minimal

trains the smallest configuration on the bytes of this very file, for a few steps.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import cast

import jax
import numpy as np
import optax
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax.layout import Document, Layout, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.pretrain import make_loss_fn
from deepseek_jax.optim import router_bias
from deepseek_jax.optim.optimizer import make_optimizer
from deepseek_jax.types import ModelOutput
from train.stages import spans

STEPS = 8


def make_step(settings: Settings):
  """The step (params, balance, opt_state, batch) -> (..., ..., ..., loss), and its optimizer."""
  model = Model(settings.model, indexer_loss=settings.objective.indexer)
  optimizer = make_optimizer(settings.optim, spans(settings), settings.model.engram)
  apply = cast(Callable[..., ModelOutput], model.apply)
  loss_fn = make_loss_fn(apply, settings.objective, settings.model.numerics.compute_dtype)

  @jax.jit
  def step(params, balance, opt_state, batch: Layout):
    # Next-token loss + balance loss + the indexers' loss, each divided by its count in the batch.
    denominators = count(batch, settings.model)
    loss_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (_, layers, _)), grads = loss_and_grad(params, balance, batch, denominators)

    # On float32 weights, which the model casts to compute_dtype where it uses them.
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)

    # Router biases have no gradient: they move against the load of each expert.
    balance = router_bias.update(balance, layers, settings.optim.bias_speed)
    return params, balance, opt_state, loss

  return step, optimizer


def init(settings: Settings, batch: Layout) -> tuple[dict, dict]:
  """Random weights, and router biases of zero."""
  model, key = Model(settings.model), jax.random.key(settings.seed)
  variables = nn.unbox(jax.jit(model.init)(key, batch))
  return variables["params"], variables["balance"]


def batches(settings: Settings, text: bytes) -> Iterator[Layout]:
  """Batches of the text's bytes, each row two documents of half the row."""
  slots, rows = settings.data.slots, settings.data.batch_rows
  byte_classes = np.arange(settings.model.vocab, dtype=np.int32)
  hashing = NgramHash(settings.model.engram, byte_classes)
  tokens = np.frombuffer(text, np.uint8).astype(np.int32)
  random = np.random.default_rng(settings.data.shuffle_seed)

  def document() -> Document:
    start, length = random.integers(len(tokens) - slots), slots // 2
    return Document(tokens[start : start + length], int(tokens[start + length]))

  while True:
    yield stack_layouts(
      [
        build_layout(
          [document(), document()], slots=slots, ratios=settings.model.ratios, hashing=hashing
        )
        for _ in range(rows)
      ]
    )


def main() -> None:
  settings = Settings.from_dict(nano.get_config().to_dict())
  data = batches(settings, pathlib.Path(__file__).read_bytes())
  step, optimizer = make_step(settings)
  params, balance = init(settings, next(data))
  opt_state = optimizer.init(params)
  for number in range(1, STEPS + 1):
    params, balance, opt_state, loss = step(params, balance, opt_state, next(data))
    print(f"step {number}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
  main()
