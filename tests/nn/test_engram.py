"""Engram's gate and what it leaves alone. Legend: B rows, Q slots, c streams, D width."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from deepseek_jax.config import EngramConfig, ModelConfig, NumericsConfig
from deepseek_jax.nn.engram import Engram, gate
from deepseek_jax.types import Slots

B, Q, C, D, EPS = 2, 5, 3, 8, 1e-20
CFG = ModelConfig(
  dim=D,
  streams=C,
  engram=EngramConfig(layers=(0,), table_rows=(11,), max_ngram=2, heads=2, head_dim=4),
  numerics=NumericsConfig(compute_dtype="float32"),
  init_std=0.5,
)
ROWS_BQLR = np.random.default_rng(0).integers(0, 11, (B, Q, 1, 2)).astype(np.int32)
ROWS_BQLR[1, 3:] = -1  # padding
IS_VISION_BQ = np.array([[False, True, True, False, False], [False] * 5])
SLOTS = Slots(None, IS_VISION_BQ, ROWS_BQLR[:, :, 0, 0] >= 0, None, None, None, ROWS_BQLR)


@pytest.fixture(scope="module")
def engram():
  module, streams = Engram(CFG, 0), jnp.zeros((B, Q, C, D))
  variables = nn.unbox(jax.jit(lambda key: module.init(key, streams, SLOTS))(jax.random.key(0)))
  return module, variables


def random(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def test_the_gate_is_the_sigmoid_of_the_signed_root_of_the_normalized_product():
  streams, keys, gain = random(0, 9, C, D), random(1, 9, C, D), random(2, C, D)
  got = gate(streams, keys, gain, eps=EPS)
  x, k = np.float64(streams), np.float64(keys)
  rms = lambda v: np.sqrt(np.mean(v * v, -1))
  product = np.sum(x * gain * k, -1) / rms(x) / rms(k) / np.sqrt(D)
  want = 1 / (1 + np.exp(-np.sign(product) * np.sqrt(np.maximum(np.abs(product), 1e-6))))
  np.testing.assert_allclose(got, want, rtol=1e-5)
  assert (product < 0).any() and (product > 0).any()


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0])
def test_the_gate_has_finite_gradients_where_its_root_has_none(size):
  keys, gain = random(1, 9, C, D), jnp.ones((C, D))
  total = lambda streams: gate(streams, keys, gain, eps=EPS).sum()
  assert np.isfinite(jax.grad(total)(size * random(0, 9, C, D))).all()


def test_image_tokens_and_padding_keep_their_streams_bit_for_bit(engram):
  module, variables = engram
  streams = random(3, B, Q, C, D)
  out = jax.jit(module.apply)(variables, streams, SLOTS)
  untouched_BQ = IS_VISION_BQ | (ROWS_BQLR[:, :, 0, 0] < 0)
  np.testing.assert_array_equal(out[untouched_BQ], streams[untouched_BQ])
  assert np.all(np.any(out[~untouched_BQ] != streams[~untouched_BQ], axis=-1))


def test_every_stream_gets_the_same_value_times_its_own_gate(engram):
  module, variables = engram
  streams = random(3, B, Q, C, D)
  added_BcD = np.asarray(jax.jit(module.apply)(variables, streams, SLOTS) - streams)[:, 0]
  first_BD = added_BcD[:, 0]
  for stream in range(1, C):
    ratio = np.sum(added_BcD[:, stream] * first_BD, -1) / np.sum(first_BD**2, -1)
    np.testing.assert_allclose(added_BcD[:, stream], ratio[:, None] * first_BD, atol=1e-5)


def test_rows_that_are_not_read_get_no_gradient(engram):
  module, variables = engram
  streams = random(3, B, Q, C, D)
  total = lambda v: jnp.sum(module.apply(v, streams, SLOTS) ** 2)
  d_table = jax.jit(jax.grad(total))(variables)["params"]["table"]
  live = (ROWS_BQLR[:, :, 0] >= 0) & ~IS_VISION_BQ[..., None]
  read = np.isin(np.arange(len(d_table)), ROWS_BQLR[:, :, 0][live])
  np.testing.assert_array_equal(np.any(d_table != 0, -1), read)
  assert 0 < read.sum() < 11


def test_a_table_s_rows_come_from_its_own_column():
  two = dataclasses.replace(CFG.engram, layers=(0, 1), table_rows=(11, 11))
  module = Engram(dataclasses.replace(CFG, engram=two), 1)
  streams = random(3, B, Q, C, D)
  both = np.concatenate([ROWS_BQLR * 0, ROWS_BQLR], axis=2)
  slots = SLOTS._replace(engram_rows_BQLR=both)
  variables = nn.unbox(jax.jit(lambda key: module.init(key, streams, slots))(jax.random.key(0)))
  alone = jax.jit(Engram(CFG, 0).apply)(variables, streams, SLOTS)
  np.testing.assert_array_equal(jax.jit(module.apply)(variables, streams, slots), alone)
