"""Weights that are rounded before the first step give what weights give that every step rounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.sampling.cache import decoding_config, empty_cache
from deepseek_jax.sampling.forward import CachedModel
from deepseek_jax.sampling.sampler import Programs
from deepseek_jax.sampling.weights import decoding_weights
from tests.sampling.small_model import CFG, S

NUMERICS = dataclasses.replace(CFG.numerics, compute_dtype="bfloat16")
BF16 = dataclasses.replace(CFG, numerics=NUMERICS)
ARGUMENTS = np.array([[3]], np.int32), np.full((1, 1, 2, 4), 7, np.int32), np.ones(1, np.int32)


def setup():
  cfg = decoding_config(BF16, packed=True)
  cache = empty_cache(cfg, rows=1, capacity=S, packed=True)
  return Programs(CachedModel(cfg, packed=True)), cache


def shapes_cast(jaxpr, dtype):
  """Shapes of the float32 arrays that a program casts."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "convert_element_type":
      (array,) = equation.invars
      if array.aval.dtype == jnp.float32 and equation.params["new_dtype"] == dtype:
        yield array.aval.shape
    for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from shapes_cast(inner, dtype)


def test_no_step_casts_a_weight(small):
  programs, cache = setup()
  weights = decoding_weights(BF16, small.variables)
  program = jax.make_jaxpr(programs.extend)(weights, cache, *ARGUMENTS)
  leaves = jax.tree_util.tree_leaves_with_path(weights)
  kept = {path[-1].key: x.shape for path, x in leaves if x.dtype == "float32"}
  assert {"head", "gate", "fn", "wgate", "attn_norm", "sink", "bias"} <= kept.keys()
  rounded = {x.shape for _, x in leaves if x.dtype == "bfloat16"} - set(kept.values())
  assert len(rounded) >= 8 and not rounded & set(shapes_cast(program.jaxpr, jnp.bfloat16))


@pytest.mark.slow
def test_rounded_weights_give_the_same_bits(small):
  """Without a cast there and back that XLA leaves out, which would make the second one finer."""
  results = []
  for variables in (small.variables, decoding_weights(BF16, small.variables)):
    programs, cache = setup()
    lowered = programs.extend.lower(variables, cache, *ARGUMENTS)
    step = lowered.compile({"xla_allow_excess_precision": False})
    results.append(step(variables, cache, *ARGUMENTS))
  jax.tree.map(np.testing.assert_array_equal, *results)
