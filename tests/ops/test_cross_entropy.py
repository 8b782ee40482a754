"""Chunked cross-entropy is the plain one, in value and gradient, without holding all logits.

Legend: B rows, T slots, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.cross_entropy import linear_cross_entropy, linear_token_nll
from tests.thinned import rest_slow

TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}


def inputs(rows=2, slots=25, vocab=37, dim=16, dtype="float32"):
  keys = jax.random.split(jax.random.key(0), 4)
  hidden_BTD = jax.random.normal(keys[0], (rows, slots, dim), dtype)
  head_VD = jax.random.normal(keys[1], (vocab, dim), dtype)
  targets_BT = jax.random.randint(keys[2], (rows, slots), 0, vocab)
  weights_BT = jax.random.uniform(keys[3], (rows, slots)).at[0, :5].set(0.0)
  return hidden_BTD, head_VD, targets_BT, weights_BT


def value_and_grads(implementation, chunk_tokens, compute_dtype, arrays):
  def loss(hidden_BTD, head_VD, targets_BT, weights_BT):
    return linear_cross_entropy(
      hidden_BTD,
      head_VD,
      targets_BT,
      weights_BT,
      chunk_tokens=chunk_tokens,
      compute_dtype=compute_dtype,
      implementation=implementation,
    )

  value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 3)))(*arrays)
  return value, *grads


def relative_error(got, want):
  got, want = np.float64(got), np.float64(want)
  return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("chunk_tokens", rest_slow([10, 50, 1, 16, 49, 1000], 2))
def test_value_and_gradients_match_the_reference(chunk_tokens, dtype):
  arrays = inputs()
  got = value_and_grads("xla", chunk_tokens, dtype, arrays)
  for g, w in zip(got, value_and_grads("reference", chunk_tokens, "float32", arrays), strict=True):
    assert g.dtype == w.dtype == jnp.float32
    assert relative_error(g, w) < TOLERANCE[dtype]


def test_gradients_come_in_the_dtypes_of_the_inputs():
  _, d_hidden, d_head, _ = value_and_grads("xla", 16, "bfloat16", inputs(dtype="bfloat16"))
  assert d_hidden.dtype == d_head.dtype == jnp.bfloat16


def test_head_gradient_adds_up_in_float32_over_bfloat16_chunks():
  """One large and 1023 small contributions to one number: bfloat16 would lose the small ones."""
  tokens = 1024
  hidden_BTD = jnp.full((1, tokens, 1), 1.0)
  weights_BT = jnp.full((1, tokens), 1 / 1024).at[0, 0].set(1.0)
  arrays = (hidden_BTD, jnp.zeros((2, 1)), jnp.zeros((1, tokens), jnp.int32), weights_BT)
  _, _, d_head, _ = value_and_grads("xla", 1, "bfloat16", arrays)
  np.testing.assert_allclose(d_head[:, 0], [-0.5 * (1 + 1023 / 1024), 0.5 * (1 + 1023 / 1024)])


def test_nll_per_token_keeps_the_order_of_the_tokens():
  hidden_BTD, head_VD, targets_BT, _ = inputs()
  nll = lambda implementation: linear_token_nll(
    hidden_BTD,
    head_VD,
    targets_BT,
    chunk_tokens=16,
    compute_dtype="float32",
    implementation=implementation,
  )
  np.testing.assert_allclose(nll("xla"), nll("reference"), rtol=1e-5)


def test_huge_logits_give_finite_values_and_gradients():
  hidden_BTD, head_VD, targets_BT, weights_BT = inputs()
  for x in value_and_grads(
    "xla", 16, "float32", (hidden_BTD * 1e4, head_VD, targets_BT, weights_BT)
  ):
    assert np.isfinite(x).all()


def test_memory_of_value_and_gradient_is_a_fraction_of_the_logits():
  tokens, vocab, dim = 4096, 8192, 64
  shapes = (
    jax.ShapeDtypeStruct((1, tokens, dim), jnp.float32),
    jax.ShapeDtypeStruct((vocab, dim), jnp.float32),
    jax.ShapeDtypeStruct((1, tokens), jnp.int32),
  )

  def temporary_bytes(implementation):
    def loss(hidden_BTD, head_VD, targets_BT):
      return linear_cross_entropy(
        hidden_BTD,
        head_VD,
        targets_BT,
        jnp.ones((1, tokens)),
        chunk_tokens=256,
        compute_dtype="float32",
        implementation=implementation,
      )

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  logits = tokens * vocab * 4
  assert temporary_bytes("reference") >= logits
  assert temporary_bytes("xla") < logits / 5


def test_the_tokamax_kernel_states_that_it_needs_a_tpu():
  with pytest.raises(NotImplementedError, match="needs a TPU, the backend is cpu"):
    value_and_grads("tokamax", 16, "float32", inputs())
