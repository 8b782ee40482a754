"""The model with its kernels, compiled for one H200: what no machine without a GPU can run."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from flax import linen as nn

from configs import small
from configs.schema import Settings
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model
from deepseek_jax.objective.denominators import count
from deepseek_jax.objective.pretrain import make_loss_fn
from deepseek_jax.ops import dispatch
from deepseek_jax.sharding import make_mesh
from tests.aot.targets import compile_for, h200

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
TOKENS = 2048


def settings_of_six_layers() -> Settings:
  """configs/small.py cut down to one layer of every kind."""
  config = small.get_config()
  config.model.update(compress_ratios=(0, 2, 2, 1, 1, 1), decoder_start=3)
  config.model.update(kv_sources=(1, 3), index_sources=(1, 3, 5))
  config.model.indexer.pool_source = 3
  config.model.engram.layers = (1,)
  config.model.engram.table_rows = config.model.engram.table_rows[:1]
  return Settings.from_dict(config.to_dict())


def test_a_training_step_compiles_with_the_kernels_chosen(caplog):
  settings = settings_of_six_layers()
  cfg = settings.model
  one_device = dataclasses.replace(settings.mesh, fsdp=1)
  target = make_mesh(one_device, list(h200().devices.flat))
  model = Model(cfg, indexer_loss="sparse")
  loss_fn = make_loss_fn(model.apply, settings.objective, cfg.numerics.compute_dtype)
  layout = build_layout([Document(np.zeros(TOKENS))], slots=TOKENS, ratios=cfg.ratios)
  rows = (1, TOKENS, len(cfg.engram.layers), cfg.engram.lookups)
  layout = layout._replace(engram_rows=np.zeros(rows, np.int32))
  init = lambda key: nn.unbox(model.init(key, layout))
  variables = jax.eval_shape(init, jax.random.key(0))
  arguments = jax.eval_shape(lambda: (layout, count(layout, cfg)))
  step = jax.value_and_grad(loss_fn, has_aux=True)
  dispatch._log_choice.cache_clear()  # each choice is logged once in a process
  with caplog.at_level(logging.INFO, "deepseek_jax.ops.dispatch"):
    compiled = compile_for(target, step, variables["params"], variables["balance"], *arguments)
  chosen = {r.args[0].rpartition(".")[2]: r.args[1] for r in caplog.records}
  assert chosen["sparse_attention"] == chosen["select"] == chosen["divergence"] == "pallas_gpu"
  assert chosen["grouped_matmul"] == "pallas_gpu"
  assert compiled.memory_analysis().temp_size_in_bytes < 40e9
