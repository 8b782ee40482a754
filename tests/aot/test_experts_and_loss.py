"""Expert products and cross-entropy compiled for accelerators at release sizes; not run there.

Legend: P rows, G experts, K input width, N output width, X tokens, D width, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from deepseek_jax.ops.cross_entropy import linear_token_nll
from deepseek_jax.ops.grouped_matmul import grouped_matmul
from tests.aot import targets

pytestmark = pytest.mark.slow

TPUS = ("v5p", "v6e", "tpu7x")
# The release: 5120 wide, 384 experts of 2304; 16,384 tokens go to 6 experts each.
EXPERTS, MODEL_WIDTH, EXPERT_WIDTH, BLOCK = 384, 5120, 2304, 64
ROWS = 16_384 * 6 + EXPERTS * BLOCK
VOCABULARY, TOKENS = 129_280, 16_384

struct = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)


def expert_products(implementation, x_PK, w_GKN, rows_G, d_y_PN):
  multiply = lambda x, w: grouped_matmul(
    x, w, rows_G, block_rows=BLOCK, implementation=implementation
  )
  y_PN, gradients = jax.vjp(multiply, x_PK, w_GKN)
  return y_PN, *gradients(d_y_PN)


def expert_shapes(experts=EXPERTS):
  return (
    struct(ROWS, MODEL_WIDTH),
    struct(experts, MODEL_WIDTH, EXPERT_WIDTH),
    struct(experts, dtype=jnp.int32),
    struct(ROWS, EXPERT_WIDTH),
  )


def temporary_bytes(compiled):
  return compiled.memory_analysis().temp_size_in_bytes


def test_the_h200_multiplies_experts_without_a_copy_of_a_matrix():
  products = functools.partial(expert_products, None)
  compiled = targets.compile_for(targets.h200(), products, *expert_shapes())
  assert temporary_bytes(compiled) < 1e6  # tables of tiles
  assert "mosaic_gpu" in compiled.as_text()


@pytest.mark.parametrize("chip", TPUS)
def test_a_tpu_multiplies_experts_with_one_transposed_copy_at_most(chip):
  products = functools.partial(expert_products, None)
  compiled = targets.compile_for(targets.tpu(chip), products, *expert_shapes())
  copy = EXPERTS * MODEL_WIDTH * EXPERT_WIDTH * 2
  assert temporary_bytes(compiled) < 1.01 * copy
  assert "ragged-dot" in compiled.as_text()


@pytest.mark.parametrize("chip", ["v6e", "h200"])
def test_the_plain_path_holds_few_matrices(chip):
  """Not so on tpu7x, where XLA lays all matrices out anew before it loops over them."""
  target = targets.h200() if chip == "h200" else targets.tpu(chip)
  products = functools.partial(expert_products, "xla")
  compiled = targets.compile_for(target, products, *expert_shapes())
  rows_bytes = ROWS * (MODEL_WIDTH + EXPERT_WIDTH) * 2
  assert temporary_bytes(compiled) < rows_bytes + 16 * MODEL_WIDTH * EXPERT_WIDTH * 4


def loss_and_gradients(implementation, hidden_BTD, head_VD, targets_BT):
  nll = lambda hidden_BTD, head_VD: linear_token_nll(
    hidden_BTD,
    head_VD,
    targets_BT,
    chunk_tokens=2048,
    compute_dtype=jnp.bfloat16,
    implementation=implementation,
  )
  nll_BT, gradients = jax.vjp(nll, hidden_BTD, head_VD)
  return nll_BT, *gradients(jnp.ones_like(nll_BT))


def compiled_loss(target, implementation):
  return targets.compile_for(
    target,
    functools.partial(loss_and_gradients, implementation),
    struct(1, TOKENS, MODEL_WIDTH),
    struct(VOCABULARY, MODEL_WIDTH),
    struct(1, TOKENS, dtype=jnp.int32),
  )


@pytest.mark.parametrize("chip", ["v6e", "h200"])
def test_the_plain_loss_never_holds_the_logits(chip):
  target = targets.h200() if chip == "h200" else targets.tpu(chip)
  assert temporary_bytes(compiled_loss(target, None)) < TOKENS * VOCABULARY * 4


@pytest.mark.parametrize("chip", TPUS)
def test_the_tokamax_loss_never_holds_the_logits(chip):
  tokamax = pytest.importorskip("tokamax")
  with tokamax.config.cross_compile(True):
    compiled = compiled_loss(targets.tpu(chip), "tokamax")
  assert temporary_bytes(compiled) < TOKENS * VOCABULARY * 4


def test_the_tokamax_loss_interpreted_is_the_reference():
  """The value only: tokamax's gradient rule refuses interpreted kernels."""
  tokamax = pytest.importorskip("tokamax")
  tokens, vocabulary, width = 1024, 256, 128
  keys = jax.random.split(jax.random.key(0), 3)
  hidden_BTD = jax.random.normal(keys[0], (1, tokens, width))
  head_VD = jax.random.normal(keys[1], (vocabulary, width))
  targets_BT = jax.random.randint(keys[2], (1, tokens), 0, vocabulary)
  nll = lambda implementation: jax.jit(
    functools.partial(
      linear_token_nll,
      chunk_tokens=tokens,
      compute_dtype=jnp.float32,
      implementation=implementation,
    )
  )(hidden_BTD, head_VD, targets_BT)
  want_BT = nll("reference")
  with (
    targets.tracing_for(targets.tpu("v6e")),
    tokamax.config.cross_compile(True),
    pltpu.force_tpu_interpret_mode(),
  ):
    got_BT = nll("tokamax")
  np.testing.assert_allclose(got_BT, want_BT, rtol=1e-4, atol=1e-4)
