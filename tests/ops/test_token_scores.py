"""Log-probabilities of given tokens: those of the whole softmax, however they are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.token_scores import token_scores
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig

B, T, D, V = 2, 24, 8, 40


@pytest.fixture(scope="module")
def case():
  """Hidden states, output embedding and targets, half of which are the likeliest token."""
  rng = np.random.default_rng(0)
  hidden_BTD, head_VD = rng.normal(size=(B, T, D)), rng.normal(size=(V, D))
  targets_BT = rng.integers(0, V, (B, T))
  targets_BT[:, ::2] = (hidden_BTD @ head_VD.T).argmax(-1)[:, ::2]
  return jnp.float32(hidden_BTD), jnp.float32(head_VD), jnp.int32(targets_BT)


def scores(case, chunk_tokens):
  return token_scores(*case, chunk_tokens=chunk_tokens, compute_dtype="float32")


@pytest.mark.parametrize("chunk_tokens", [1, 14, 1000])
def test_they_are_those_of_the_softmax_for_any_chunk(case, chunk_tokens):
  hidden_BTD, head_VD, targets_BT = (np.asarray(x) for x in case)
  logits_BTV = hidden_BTD @ head_VD.T
  log_p_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
  found = scores(case, chunk_tokens)
  expected_BT = np.take_along_axis(log_p_BTV, targets_BT[..., None], -1)[..., 0]
  np.testing.assert_allclose(found.log_p_BT, expected_BT, atol=2e-5)
  np.testing.assert_array_equal(found.is_top_BT, logits_BTV.argmax(-1) == targets_BT)
  assert found.log_p_BT.dtype == jnp.float32 and found.is_top_BT[:, ::2].all()


def test_of_equal_tokens_the_lowest_id_is_the_likeliest():
  hidden_BTD, targets_BT = jnp.ones((1, 2, D)), jnp.array([[0, 1]])
  found = scores((hidden_BTD, jnp.ones((V, D)), targets_BT), 100)
  assert found.is_top_BT.tolist() == [[True, False]]


def test_they_are_the_same_on_a_mesh(case):
  mesh = make_mesh(MeshConfig(fsdp=2, context=2, tensor=2))
  with jax.set_mesh(mesh):
    spread = jax.jit(lambda *case: scores(case, 4))(*case)
  alone = scores(case, 4)
  np.testing.assert_allclose(spread.log_p_BT, alone.log_p_BT, atol=1e-5)
  np.testing.assert_array_equal(spread.is_top_BT, alone.is_top_BT)
