"""What the backward pass computes again under each policy, in a program traced for a TPU."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from deepseek_jax.config import EngramConfig, IndexerConfig, ModelConfig, MoeConfig
from deepseek_jax.layout import Document, build_layout
from deepseek_jax.model import Model
from deepseek_jax.nn.block import REMAT
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
from tests.aot.targets import tpus, tracing_for

TOKENS = 1024


def gradient(remat: str):
  """The traced gradient of two window-only layers, one scanned body, with the release's heads."""
  cfg = ModelConfig(
    vocab=1024,
    dim=256,
    streams=2,
    compress_ratios=(0, 0),
    kv_sources=(),
    index_sources=(),
    decoder_start=None,
    indexer=IndexerConfig(pool_source=None),
    moe=MoeConfig(experts=4, experts_per_token=2, hidden=128),
    engram=EngramConfig(layers=(), table_rows=()),
    remat=remat,
  )
  model = Model(cfg)
  layout = build_layout([Document(np.zeros(TOKENS))], slots=TOKENS, ratios=())
  variables = jax.eval_shape(lambda key: nn.unbox(model.init(key, layout)), jax.random.key(0))
  total = lambda variables, layout: jnp.sum(model.apply(variables, layout).hidden_BTD)
  with tracing_for(make_mesh(MeshConfig(), tpus("v5p")[:1])):
    return jax.make_jaxpr(jax.grad(total, allow_int=True))(variables, layout).jaxpr


def runs(program, wanted) -> int:
  """Calls that `wanted` picks and whose results are read: the compiler leaves the others out."""
  read = {v for eqn in program.eqns for v in eqn.invars if isinstance(v, jax.extend.core.Var)}
  read |= {v for v in program.outvars if isinstance(v, jax.extend.core.Var)}
  here = sum(wanted(eqn) and any(v in read for v in eqn.outvars) for eqn in program.eqns)
  nested = (e.params for e in program.eqns if not wanted(e))
  inside = [i for params in nested for i in jax.extend.core.jaxprs_in_params(params)]
  return here + sum(runs(i, wanted) for i in inside)


def attention(eqn) -> bool:
  label = f"{eqn.params.get('name')} {eqn.params.get('name_and_src_info')}"
  return eqn.primitive.name == "pallas_call" and "sparse_attention_forward" in label


def experts(eqn) -> bool:
  return eqn.primitive.name == "ragged_dot_general"


def test_the_attention_runs_again_only_where_its_result_is_not_kept():
  assert {remat: runs(gradient(remat), attention) for remat in REMAT} == {
    "none": 1,
    "block": 2,
    "block_keep_results": 1,
  }


def test_kept_results_spare_the_last_of_an_experts_three_products():
  assert {remat: runs(gradient(remat), experts) for remat in REMAT} == {
    "none": 9,
    "block": 9 + 3,
    "block_keep_results": 9 + 2,
  }
