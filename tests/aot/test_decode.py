"""A step of decoding at 256K tokens, compiled for one H200: what it moves and what it leaves alone.

Legend: B sequences, C new slots.
"""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from deepseek_jax.sampling.cache import decoding_config, empty_cache
from deepseek_jax.sampling.forward import CachedModel
from deepseek_jax.sampling.sampler import Programs
from deepseek_jax.sharding import make_mesh
from tests.aot.targets import compile_for, h200
from tests.aot.test_model import settings_of_six_layers
from tests.bench.decode import abstract_weights

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
CONTEXT = 2**18
_BYTES = {"u8": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "pred": 1}


@pytest.fixture(scope="module")
def step():
  return compiled_step()


def compiled_step():
  """The compiled step, and the shapes of the cache that goes in."""
  settings = settings_of_six_layers()
  one_device = dataclasses.replace(settings.mesh, fsdp=1)
  target = make_mesh(one_device, list(h200().devices.flat))
  cfg = decoding_config(settings.model, packed=True)
  cache = jax.eval_shape(lambda: empty_cache(cfg, rows=1, capacity=CONTEXT, packed=True))
  rows = np.zeros((1, 1, len(cfg.engram.layers), cfg.engram.lookups), np.int32)
  arguments = jax.eval_shape(lambda: (np.zeros((1, 1), np.int32), rows, np.ones(1, np.int32)))
  programs = Programs(CachedModel(cfg, packed=True))
  compiled = compile_for(target, programs.extend, abstract_weights(settings), cache, *arguments)
  return compiled, cache


def sizes(text, operation):
  """Bytes of the results of every instruction of a kind."""
  for kind, shape in re.findall(rf"= (\w+)\[([\d,]*)\]\S* {operation}\(", text):
    yield _BYTES[kind] * math.prod(map(int, filter(None, shape.split(","))))


def test_a_step_writes_into_the_cache_that_it_is_given(step):
  compiled, cache = step
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert compiled.memory_analysis().alias_size_in_bytes >= size
  entries = min(x.size for m in cache.layers if m.entries for x in m.entries[:1])
  assert max(sizes(compiled.as_text(), "copy"), default=0) < entries
