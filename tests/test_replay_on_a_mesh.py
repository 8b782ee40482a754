"""Rows with replay on a mesh are those of one device, also where their slots are cut.

Decoder slots start from encoder slots of other devices, some of them twice.
Legend: B rows, S encoder slots, T decoder slots, W window.
"""

import jax
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.layout import Document, Layout, Replay, build_layout, stack_layouts
from deepseek_jax.ngram import NgramHash
from deepseek_jax.sharding import make_mesh, state_shardings
from tests.test_model_on_a_mesh import MESHES, SETTINGS, in_slots, loss_and_gradients

ROWS, S, T, W = 8, 104, 64, SETTINGS.model.attention.window
TURNS = [
  [(20, 26), (40, 45)],
  [(9, 12), (24, 29)],
]  # the first turn's end is in the second's window
CUTS = [[12, 32], [0, 20]]


def batch() -> Layout:
  """Two conversations a row; the second begins at an odd slot, on another device."""
  engram, rng = SETTINGS.model.engram, np.random.default_rng(0)
  hashing = NgramHash(engram, np.arange(SETTINGS.model.vocab) % engram.compressed_vocab)
  rows = []
  for _ in range(ROWS):
    tokens = [rng.integers(0, 256, length).astype(np.int32) for length in (45, 29)]
    replay = Replay(window=W, decoder_slots=T, hit_multiple=2)
    rows.append(
      build_layout(
        [Document(one) for one in tokens], TURNS, CUTS, slots=S, ratios=SETTINGS.model.ratios,
        hashing=hashing, replay=replay,
      )
    )  # fmt: skip
  return stack_layouts(rows)


@pytest.fixture(scope="module")
def on_one_device():
  model, run = loss_and_gradients("sparse")
  layout = batch()
  variables = jax.jit(lambda: nn.unbox(model.init(jax.random.key(0), layout)))()
  return variables, jax.jit(run)(variables, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context", "expert, fsdp and context"])
def test_loss_metrics_loads_and_gradients_agree(on_one_device, name):
  (variables, want), mesh = on_one_device, make_mesh(MESHES[name])
  with jax.set_mesh(mesh):
    model, run = loss_and_gradients("sparse")
    layout = batch()
    shardings = state_shardings(jax.eval_shape(model.init, jax.random.key(0), layout), mesh)
    arguments = jax.device_put((variables, layout), (shardings, in_slots(layout, mesh)))
    got = jax.jit(run, out_shardings=(None, None, None, shardings["params"]))(*arguments)
  for part, new, old in zip(("loss", "metrics", "layers", "gradients"), got, want, strict=True):
    bound = 5e-5 if part == "gradients" else 1e-5  # as without replay
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=bound * max(np.abs(y).max(), 1e-6))
