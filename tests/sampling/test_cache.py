"""What a cache holds, and in how many bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.config import flash
from deepseek_jax.ops.quantize import fake_fp8, fake_indexer, fake_main
from deepseek_jax.sampling.cache import bytes_per_token, decoding_config, empty_cache
from deepseek_jax.sampling.forward import CachedModel
from deepseek_jax.sampling.row_formats import row_formats
from deepseek_jax.sampling.sampler import Programs, Sampler
from tests.sampling.small_model import CFG, HASHING, S, random_tokens
from train.plan_cache import kv_bytes_per_token


def row_bytes(stored):
  return sum(x.shape[-1] * x.dtype.itemsize for x in stored)


def test_a_token_of_the_release_takes_890_bytes_at_a_million_tokens():
  cfg = flash()
  assert bytes_per_token(cfg, capacity=2**20) == 890
  assert kv_bytes_per_token(cfg)["global"] == 890
  assert bytes_per_token(cfg, capacity=2**20, packed=False) == 2 * 2.5 * (512 + 128)

  decoding = decoding_config(cfg, packed=True)
  cache = jax.eval_shape(lambda: empty_cache(decoding, rows=1, capacity=2**20, packed=True))
  source, plain = cache.layers[20], cache.layers[21]
  assert (row_bytes(source.entries), row_bytes(source.keys)) == (288, 68)
  assert all(row_bytes(layer.window) == 528 for layer in cache.layers)
  assert {layer.window[0].shape[1] for layer in cache.layers} == {128}
  assert plain.entries is None and plain.keys is None and plain.pending is None
  assert [x.shape for x in cache.layers[2].pending] == [(1, 1, 512)] * 2
  assert cache.recent.shape == (1, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_packed_rows_gives_what_fake_quantization_gives(dtype):
  numerics = dataclasses.replace(CFG.numerics, compute_dtype=dtype)
  cfg = decoding_config(dataclasses.replace(CFG, numerics=numerics), packed=True)
  formats = row_formats(cfg, packed=True)
  rng = np.random.default_rng(0)
  size = np.exp(rng.uniform(-12, 6, (64, 1)))  # from below the smallest scale to the largest
  x = jnp.asarray(size * rng.normal(size=(64, 128)), dtype)
  x = x.at[0].set(0).at[1, :64].set(0)
  for form, fake in zip(formats, (fake_fp8, fake_main, fake_indexer), strict=True):
    read = jax.jit(lambda x, form=form: form.read(form.write(x)))(x)
    np.testing.assert_array_equal(read, jax.jit(fake)(x))
    assert read.dtype == dtype


def test_packed_rows_need_the_rounding_that_they_do():
  with pytest.raises(ValueError, match="main_fp4"):
    row_formats(CFG, packed=True)


def test_a_capacity_between_two_entries_is_refused():
  with pytest.raises(ValueError, match=r"capacity is 7.*\[2\]"):
    empty_cache(CFG, rows=1, capacity=7, packed=False)


@pytest.mark.slow
def test_a_packed_cache_decodes_what_a_plain_one_with_rounding_decodes(small):
  """To the bit: packed bytes and rounded floats are the same values."""
  cfg = decoding_config(CFG, packed=True)
  tokens, last = random_tokens(5, 29), []
  for packed in (True, False):
    sampler = Sampler(cfg, small.variables, HASHING, packed=packed, chunk=8)
    cache, logits_BV = sampler.prefill(sampler.new_cache(1, S), [tokens[:21]])
    each = [logits_BV]
    for token in tokens[21:]:
      cache, logits_BV = sampler.step(cache, [token], [True])
      each.append(logits_BV)
    last.append(np.stack(each))
  np.testing.assert_array_equal(*last)


def products(jaxpr):
  """Shapes of all matrix products of a program."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation.outvars[0].aval.shape
    for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from products(inner)


def test_in_a_step_only_a_source_scores_every_key(small):
  """A restricted layer scores its pool's members, attention its choice, however many there are."""
  capacity = 4096
  cache = jax.eval_shape(lambda: empty_cache(CFG, rows=1, capacity=capacity, packed=False))
  model = Programs(CachedModel(CFG, packed=False))
  token, rows = np.zeros((1, 1), np.int32), np.zeros((1, 1, 2, 4), np.int32)
  program = jax.make_jaxpr(model.extend)(small.variables, cache, token, rows, np.ones(1, int))
  long = [shape for shape in products(program.jaxpr) if max(shape) > 1024]
  heads = CFG.indexer.heads
  assert sorted(long) == [(1, 1, heads, capacity // 2), (1, 1, heads, capacity)]
