"""The model and its gradients on a mesh are those of one device.

Legend: B rows, S slots.
"""

import functools
import math
import re

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding

from configs import nano
from configs.schema import Settings
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.ngram import NgramHash
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.pretrain import make_loss_fn
from deepseek_jax.sharding import batch_pieces, make_mesh, partition_spec, state_shardings
from deepseek_jax.training_config import MeshConfig

SETTINGS = Settings.from_dict(nano.get_config().to_dict())
ROWS = 16  # so that the streams of a device's rows are larger than any weight
MESHES = {
  "fsdp": MeshConfig(fsdp=8),
  "context": MeshConfig(replica=2, context=4),
  "expert, fsdp and context": MeshConfig(fsdp=2, expert=2, context=2),
  "tensor": MeshConfig(fsdp=4, tensor=2),
}


def batch():
  """Documents that begin at odd slots, cross the borders of devices, and leave padding."""
  rng = np.random.default_rng(0)
  engram = SETTINGS.model.engram
  hashing = NgramHash(engram, np.arange(SETTINGS.model.vocab) % engram.compressed_vocab)
  documents = lambda row: [
    Document(rng.integers(0, 256, length).astype(np.int32)) for length in (7 + row % 8, 31, 18)
  ]
  row = lambda number: build_layout(
    documents(number), slots=SETTINGS.data.slots, ratios=SETTINGS.model.ratios, hashing=hashing
  )
  return stack_layouts([row(number) for number in range(ROWS)])


def loss_and_gradients(indexer_loss):
  model = Model(SETTINGS.model, indexer_loss=indexer_loss)
  loss_fn = make_loss_fn(model.apply, SETTINGS.objective, "float32")

  def run(variables, layout):
    loss = lambda params: loss_fn(
      params, variables["balance"], layout, count(layout, SETTINGS.model)
    )
    (value, (metrics, layers, _)), gradients = jax.value_and_grad(loss, has_aux=True)(
      variables["params"]
    )
    return value, metrics, layers, gradients

  return model, run


@functools.cache
def on_one_device(indexer_loss="sparse"):
  model, run = loss_and_gradients(indexer_loss)
  layout = batch()
  variables = jax.jit(lambda: nn.unbox(model.init(jax.random.key(0), layout)))()
  return variables, jax.jit(run)(variables, layout)


def in_slots(layout, mesh):
  def place(x):
    names = ("batch", "slots", *(None,) * (x.ndim - 2))
    return NamedSharding(mesh, partition_spec(names, x.shape, mesh))

  return jax.tree.map(place, layout)


def compiled_on(mesh, variables, indexer_loss="sparse"):
  model, run = loss_and_gradients(indexer_loss)
  layout = batch()
  shardings = state_shardings(jax.eval_shape(model.init, jax.random.key(0), layout), mesh)
  arguments = jax.device_put((variables, layout), (shardings, in_slots(layout, mesh)))
  jitted = jax.jit(run, out_shardings=(None, None, None, shardings["params"]))
  return jitted.lower(*arguments).compile(), arguments


def elements_sent(program):
  """The largest result of each collective, in elements."""
  kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  results = re.findall(rf"= (\S+|\([^)]*\)) (?:{kinds})(?:-start)?\(", program)
  shapes = [re.findall(r"\w+\[([\d,]*)\]", result) for result in results]
  size = lambda shape: math.prod(int(n) for n in shape.split(",") if n)
  return [max(map(size, found)) for found in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "indexer_loss"),
  [*((name, "sparse") for name in MESHES), ("context", "dense"), ("fsdp", "dense")],
)
def test_loss_metrics_loads_and_gradients_agree(name, indexer_loss):
  variables, want = on_one_device(indexer_loss)
  mesh = make_mesh(MESHES[name])
  with jax.set_mesh(mesh):
    compiled, arguments = compiled_on(mesh, variables, indexer_loss)
    got = compiled(*arguments)
  names = ("loss", "metrics", "layers", "gradients")
  for name, new, old in zip(names, got, want, strict=True):
    # The gate of an Engram divides by norms: its gradients lose a digit to the order of sums.
    bound = 5e-5 if name == "gradients" else 1e-5
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=bound * max(np.abs(y).max(), 1e-6))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context", "expert, fsdp and context"])
def test_no_device_collects_the_streams_of_a_row(name):
  cfg = MESHES[name]
  mesh = make_mesh(cfg)
  with jax.set_mesh(mesh):
    compiled, _ = compiled_on(mesh, on_one_device()[0])
  model, rows = SETTINGS.model, ROWS // batch_pieces(cfg)
  sent = elements_sent(compiled.as_text())
  assert sent and max(sent) < rows * SETTINGS.data.slots * model.streams * model.dim
