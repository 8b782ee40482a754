"""Memory of the plain path grows linearly with the sequence; measured on compiled programs."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

from configs import tiny
from configs.schema import Settings
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.pretrain import make_loss_fn

SETTINGS = Settings.from_dict(tiny.get_config().to_dict())
pytestmark = pytest.mark.slow


@functools.cache
def memory(tokens: int) -> tuple[int, int]:
  """(temporary bytes, argument bytes) of value and gradient of the training loss on one row."""
  cfg, objective = SETTINGS.model, SETTINGS.objective
  model = Model(cfg, indexer_loss="sparse")
  loss_fn = make_loss_fn(model.apply, objective, cfg.numerics.compute_dtype)
  layout = build_layout([Document(np.zeros(tokens))], slots=tokens, ratios=cfg.ratios)
  rows = (1, tokens, len(cfg.engram.layers), cfg.engram.lookups)
  layout = layout._replace(engram_rows=np.zeros(rows, np.int32))
  init = lambda key: nn.unbox(model.init(key, layout))
  variables = jax.eval_shape(init, jax.random.key(0))
  arguments = jax.eval_shape(lambda: (layout, count(layout, cfg)))
  step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
  lowered = step.lower(variables["params"], variables["balance"], *arguments)
  analysis = lowered.compile().memory_analysis()
  return analysis.temp_size_in_bytes, analysis.argument_size_in_bytes


def test_8192_tokens_forward_and_backward_fit_in_six_gigabytes():
  assert sum(memory(8192)) < 6e9


def test_temporaries_grow_about_linearly():
  assert memory(8192)[0] < 2.3 * memory(4096)[0]
