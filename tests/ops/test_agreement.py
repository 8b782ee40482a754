"""Two predictions compared in chunks are what all logits at once say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.ops.agreement import token_agreement

B, T, D, V = 2, 7, 8, 33


@pytest.fixture(scope="module")
def given():
  key = jax.random.split(jax.random.key(0), 4)
  p_BTD, noise = (jax.random.normal(k, (B, T, D)) for k in key[:2])
  head_VD = jax.random.normal(key[2], (V, D))
  return p_BTD, p_BTD + 0.3 * noise, head_VD, jax.random.randint(key[3], (B, T), 0, V)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_it_is_what_all_logits_say(given, chunk_tokens):
  p_BTD, q_BTD, head_VD, targets_BT = given
  found = token_agreement(*given, chunk_tokens=chunk_tokens, compute_dtype="float32")
  logits = lambda x_BTD: np.asarray(x_BTD, np.float64) @ np.asarray(head_VD, np.float64).T
  p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (logits(p_BTD), logits(q_BTD)))
  at = lambda x_BTV: np.take_along_axis(x_BTV, np.asarray(targets_BT)[..., None], -1)[..., 0]
  assert found.p_nll_BT == pytest.approx(-np.log(at(p)), abs=1e-5)
  assert found.q_nll_BT == pytest.approx(-np.log(at(q)), abs=1e-5)
  assert found.kl_BT == pytest.approx((p * np.log(p / q)).sum(-1), abs=1e-5)
  same = p.argmax(-1) == q.argmax(-1)
  assert found.same_top_BT.tolist() == same.tolist() and 0 < same.sum() < same.size


def test_equal_states_agree_and_the_direction_matters(given):
  p_BTD, q_BTD, *rest = given
  compare = lambda a, b: token_agreement(a, b, *rest, chunk_tokens=8, compute_dtype="float32")
  itself = compare(p_BTD, p_BTD)
  assert jnp.all(itself.kl_BT == 0) and jnp.all(itself.same_top_BT == 1)
  assert not np.allclose(compare(p_BTD, q_BTD).kl_BT, compare(q_BTD, p_BTD).kl_BT, rtol=1e-2)
