"""Peak memory and time of `train convert` on a synthetic released checkpoint.

  python -m tests.bench convert --folder DIR [--gigabytes 3] [--devices 1] [--json F]

DIR gets the checkpoint, what it becomes and what that becomes, about nine times the size; they are
removed at the end. Peak memory is the largest resident set of the converting process.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import ml_dtypes
import numpy as np

from deepseek_jax.checkpoint.released_export import write_index
from deepseek_jax.checkpoint.released_index import release_tensors, shard_plan
from deepseek_jax.checkpoint.released_names import parameters
from deepseek_jax.checkpoint.safetensors_file import Header, write_safetensors
from deepseek_jax.config import (
  AttentionConfig,
  EngramConfig,
  IndexerConfig,
  ModelConfig,
  MoeConfig,
)
from deepseek_jax.ngram import hash_primes

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PIECE_BYTES = 2**26
_SHARD_BYTES = 10**9
_PRIMES_FROM = 41_000  # 24 of them are a million rows
# Runs a command and prints the largest resident set of any of its processes, in bytes.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(code)
"""


def main(arguments: list[str]) -> int:
  parser = argparse.ArgumentParser("python -m tests.bench convert", description=__doc__)
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--gigabytes", type=float, default=3.0)
  parser.add_argument("--devices", type=int, default=1)
  parser.add_argument("--json", type=pathlib.Path)
  options = parser.parse_args(arguments)
  cfg = model(options.gigabytes)
  source, run, back = (options.folder / name for name in ("released", "run", "back"))
  source.mkdir(parents=True)
  try:
    record = write_source(cfg, source) | {"devices": options.devices}
    record["import"] = measure(source, run, options.devices, "--format", "checkpoint")
    record["export"] = measure(run, back, 1, "--format", "released", "--dtype", "released")
  finally:
    for folder in (source, run, back):
      shutil.rmtree(folder, ignore_errors=True)
  print(json.dumps(record, indent=1))
  if options.json:
    options.json.write_text(json.dumps(record, indent=1) + "\n")
  return 0


def model(gigabytes: float) -> ModelConfig:
  """Experts, tables and embeddings in about the release's proportions, 0.24 GB for each layer."""
  layers = max(4, round(gigabytes / 0.24))
  tables = tuple(range(0, layers, 3))
  return ModelConfig(
    vocab=65536,
    dim=1024,
    compress_ratios=(0,) * 2 + (1,) * (layers - 2),
    kv_sources=(2,),
    index_sources=(2,),
    decoder_start=2,
    attention=AttentionConfig(heads=8, head_dim=128, q_rank=256, o_rank=256, o_groups=2),
    indexer=IndexerConfig(heads=4, head_dim=128, top_k=64, pool_source=None),
    moe=MoeConfig(experts=64, hidden=1024),
    engram=EngramConfig(
      layers=tables,
      prime_start=_PRIMES_FROM,
      table_rows=tuple(sum(primes) for primes in hash_primes(len(tables), 24, _PRIMES_FROM)),
    ),
  )


def write_source(cfg: ModelConfig, folder: pathlib.Path) -> dict:
  """Random bytes that are numbers, with scales around 2^-10. Returns sizes in bytes."""
  random = np.random.default_rng(0)
  shards = shard_plan(release_tensors(cfg), limit=_SHARD_BYTES)

  def pieces(entries):
    for name, header in entries.items():
      row = header._replace(shape=header.shape[1:]).bytes
      step = max(1, _PIECE_BYTES // row)
      for begin in range(0, header.shape[0], step):
        rows = min(step, header.shape[0] - begin)
        yield name, values(random, header._replace(shape=(rows, *header.shape[1:])))

  for shard in shards:
    write_safetensors(folder / shard.file, shard.entries, pieces(shard.entries))
  write_index(folder, shards, cfg, "released")
  sizes = [header.bytes for shard in shards for header in shard.entries.values()]
  leaves = [4 * int(np.prod(parameter.shape)) for parameter in parameters(cfg)]
  return {
    "released_bytes": sum(sizes),
    "largest_tensor_bytes": max(sizes),
    "checkpoint_bytes": sum(leaves),
    "largest_parameter_bytes": max(leaves),
  }


def values(random: np.random.Generator, header: Header) -> np.ndarray:
  match header.dtype:
    case "BF16" | "F32":
      drawn = random.standard_normal(header.shape, np.float32) * np.float32(0.02)
      return drawn.astype(ml_dtypes.bfloat16) if header.dtype == "BF16" else drawn
    case "F8_E8M0":
      codes = random.integers(115, 120, header.shape, np.uint8)
      return codes.view(ml_dtypes.float8_e8m0fnu)
    case "F8_E4M3":  # all bits of the exponent and mantissa together mean no number
      codes = random.integers(0, 256, header.shape, np.uint8) & np.uint8(0xFB)
      return codes.view(ml_dtypes.float8_e4m3fn)
  return random.integers(-128, 128, header.shape, np.int8)


def measure(source: pathlib.Path, output: pathlib.Path, devices: int, *more: str) -> dict:
  flags = f"--xla_force_host_platform_device_count={devices}"
  command = [sys.executable, "-m", "train", "convert", "--checkpoint", str(source)]
  command += ["--output", str(output), *more]
  began = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", _MEASURE, *command],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
  peak = int(done.stdout.rsplit("peak", 1)[1])
  return {"peak_bytes": peak, "seconds": round(time.monotonic() - began, 1)}
