"""The indexers' loss in a model moves nothing but indexers, and is cut like the loss of tokens.

Legend: B rows.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

from configs import nano
from configs.schema import Settings
from deepseek_jax.layout import Document, build_layout, stack_layouts
from deepseek_jax.model import Model
from deepseek_jax.objective.denominators import count
from train.programs import training_loss

B = 4
NANO = Settings.from_dict(nano.get_config().to_dict())
MODEL = dataclasses.replace(  # a layer with a pool and one that is held to it
  NANO.model,
  compress_ratios=(1, 1),
  kv_sources=(0,),
  index_sources=(0, 1),
  decoder_start=None,
  indexer=dataclasses.replace(NANO.model.indexer, pool_source=0),
  engram=dataclasses.replace(NANO.model.engram, layers=(), table_rows=()),
  remat="none",
)
LENGTHS = ((40, 3), (4,), (64,), ())  # uneven; the second has no more tokens than top-k


def settings(mode, weight=1.0):
  objective = dataclasses.replace(NANO.objective, indexer=mode, indexer_weight=weight)
  log = dataclasses.replace(NANO.log, observed_queries=0)
  return dataclasses.replace(NANO, model=MODEL, objective=objective, log=log)


def row(lengths, number):
  rng = np.random.default_rng(number)
  documents = [Document(rng.integers(0, 256, n).astype(np.int32)) for n in lengths]
  return build_layout(documents, slots=64, ratios=(1,))


def batch(rows=range(B)):
  """Other rows are padding."""
  return stack_layouts([row(LENGTHS[n] if n in rows else (), n) for n in range(B)])


@functools.cache
def variables():
  init = lambda: nn.unbox(Model(MODEL).init(jax.random.key(0), batch()))
  return jax.jit(init)()


@functools.cache
def gradients(mode):
  """Of one compiled program: (weight of the indexers' loss, layout, denominators) -> gradients."""

  def run(params, balance, weight, layout, denominators):
    loss = training_loss(settings(mode, weight))
    return jax.grad(lambda p: loss(p, balance, layout, denominators)[0])(params)

  given = variables()["params"], variables()["balance"]
  arguments = (*given, 1.0, batch(), count(batch(), MODEL))
  fast = {"xla_backend_optimization_level": 0}
  compiled = jax.jit(run).lower(*arguments).compile(compiler_options=fast)
  return lambda weight, layout, denominators: compiled(*given, weight, layout, denominators)


def split(grads):
  """Arrays of indexers, and the others."""
  leaves = [(jax.tree_util.keystr(p), np.asarray(x)) for p, x in jax.tree.leaves_with_path(grads)]
  return [x for p, x in leaves if "indexer" in p], [x for p, x in leaves if "indexer" not in p]


MODES = pytest.mark.parametrize("mode", ["sparse", pytest.param("dense", marks=pytest.mark.slow)])


@MODES
def test_weight_0_gives_indexers_a_gradient_of_exactly_0_and_the_others_the_same(mode):
  run = functools.partial(gradients(mode), layout=batch(), denominators=count(batch(), MODEL))
  off, on, twice = (split(run(np.float32(weight))) for weight in (0.0, 1.0, 2.0))
  assert off[0] and all(not np.any(x) for x in off[0])
  assert all(np.any(x) for x in on[0])
  for none, one in zip(off[1], on[1], strict=True):
    np.testing.assert_array_equal(none, one)
  for one, two in zip(on[0], twice[0], strict=True):
    np.testing.assert_allclose(2 * one, two, rtol=1e-5, atol=1e-5 * np.abs(two).max())


@MODES
def test_pieces_of_a_batch_add_up_to_it_for_indexers_and_for_all_else(mode):
  denominators = count(batch(), MODEL)
  run = lambda rows: gradients(mode)(np.float32(1.0), batch(rows), denominators)
  whole, first, second = run(range(B)), run((0, 1)), run((2, 3))
  for w, a, b in zip(*map(jax.tree.leaves, (whole, first, second)), strict=True):
    np.testing.assert_allclose(a + b, w, rtol=0, atol=1e-5 * np.abs(w).max())


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "same"), [((1,), True), ((0, 2), False)])
def test_the_two_losses_are_one_until_a_query_sees_more_than_it_chooses(rows, same):
  denominators = count(batch(), MODEL)
  sparse, dense = (
    split(gradients(mode)(np.float32(1.0), batch(rows), denominators))[0]
    for mode in ("sparse", "dense")
  )
  # Teacher and student are nearly alike at the start, so their difference loses digits.
  close = lambda a, b: np.allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())
  assert all(close(a, b) for a, b in zip(sparse, dense, strict=True)) == same


def test_the_parameters_are_the_same_whatever_the_loss():
  shapes = [
    jax.eval_shape(
      lambda mode=mode: nn.unbox(Model(MODEL, indexer_loss=mode).init(jax.random.key(0), batch()))
    )
    for mode in ("off", "dense", "sparse")
  ]
  assert shapes[0] == shapes[1] == shapes[2]
