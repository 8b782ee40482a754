"""Weights come to their devices one parameter at a time; the float32 model is never on the host."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from deepseek_jax.ngram import hash_primes
from tests.bench import convert
from tests.train.conftest import ROOT

pytestmark = pytest.mark.slow
PRIMES_FROM = 2_000
# Reads a checkpoint as `generate` does; prints sizes and how much the resident set grew, in bytes.
READ = """
import functools, json, resource, sys
import jax
from deepseek_jax.sampling.weights import decoding_dtype
from deepseek_jax.sharding import make_mesh
from deepseek_jax.training_config import MeshConfig
from train.stored_model import open_model
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model, mesh = open_model("--checkpoint", sys.argv[1]), make_mesh(MeshConfig(), jax.devices())
before = used()
dtype_of = functools.partial(decoding_dtype, model.cfg)
leaves = jax.block_until_ready(jax.tree.leaves(model.variables(mesh, dtype_of)))
sizes = [4 * x.size for x in leaves]
print(json.dumps({"grew": used() - before, "weights": sum(x.nbytes for x in leaves),
                  "as_float32": sum(sizes), "largest": max(sizes)}))
"""


def measure(folder):
  """What READ prints, of one CPU device, whose arrays lie in the same memory."""
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  command = [sys.executable, "-c", READ, str(folder)]
  done = subprocess.run(
    command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
  )
  return json.loads(done.stdout.splitlines()[-1])


def test_restoring_takes_the_weights_and_a_few_parameters(tmp_path):
  cfg = convert.model(1.9)  # eight layers, of which the next lines keep a third
  tables = tuple(sum(p) for p in hash_primes(len(cfg.engram.layers), 24, PRIMES_FROM))
  cfg = dataclasses.replace(
    cfg,
    vocab=8192,
    moe=dataclasses.replace(cfg.moe, hidden=256),
    engram=dataclasses.replace(cfg.engram, prime_start=PRIMES_FROM, table_rows=tables),
  )
  convert.write_source(cfg, tmp_path)
  found = measure(tmp_path)
  assert found["weights"] < 0.6 * found["as_float32"]
  assert found["grew"] < found["weights"] + 4 * found["largest"] < 0.9 * found["as_float32"], found
