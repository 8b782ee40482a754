"""Time, memory and error of one compiled function, and what this device can do at most."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_CALLS, _BATCHES = 20, 5
_BATCH_SECONDS = 1.0  # a batch of slow calls has fewer of them
_MATRIX = {True: 8192, False: 256}  # edge of the product that measures the matrix peak
_COPY_BYTES = {True: 1 << 30, False: 1 << 22}


class Peaks(NamedTuple):
  matrix_flops: float  # per second, bfloat16 with float32 accumulation
  copy_bytes: float  # per second, read plus written


def seconds(fn: Callable, *args) -> float:
  """Sustained time of a call: calls are queued, awaited together and divided; median of batches."""
  jax.block_until_ready(fn(*args))
  begin = time.perf_counter()
  jax.block_until_ready(fn(*args))
  once = time.perf_counter() - begin
  calls = int(np.clip(_BATCH_SECONDS / once, 1, _CALLS))
  batches = []
  for _ in range(_BATCHES):
    begin = time.perf_counter()
    for _ in range(calls):
      result = fn(*args)
    jax.block_until_ready(result)
    batches.append((time.perf_counter() - begin) / calls)
  return statistics.median(batches)


def peaks() -> Peaks:
  """A square bfloat16 product and a copy, measured now on this device."""
  accelerator = jax.default_backend() != "cpu"
  edge, size = _MATRIX[accelerator], _COPY_BYTES[accelerator]
  a, b = (jax.random.normal(jax.random.key(i), (edge, edge), jnp.bfloat16) for i in range(2))
  product = jax.jit(lambda a, b: a @ b)
  source = jnp.zeros(size // 4, jnp.float32)
  copy = jax.jit(lambda x: x + 1)
  return Peaks(2 * edge**3 / seconds(product, a, b), 2 * size / seconds(copy, source))


def random_tree(shapes: Any, deviation: float, seed: int) -> Any:
  """Normal numbers of these shapes and dtypes, by the device's own generator in one program."""
  leaves, tree = jax.tree.flatten(shapes)
  kinds = tuple((x.shape, x.dtype) for x in leaves)
  return jax.tree.unflatten(tree, _draw(jax.random.key(seed, impl="rbg"), deviation, kinds))


@functools.partial(jax.jit, static_argnames="kinds")  # 40 s to compile on a GPU: once
def _draw(key: jax.Array, deviation: float, kinds: tuple) -> list[jax.Array]:
  keys = jax.random.split(key, len(kinds))
  normal = lambda k, shape, dtype: (deviation * jax.random.normal(k, shape)).astype(dtype)
  return [normal(k, *kind) for k, kind in zip(keys, kinds, strict=True)]


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes of a program: its arguments, its results and what it holds in between."""
  analysis = compiled.memory_analysis()
  return {
    "argument_bytes": analysis.argument_size_in_bytes,
    "output_bytes": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    "temporary_bytes": analysis.temp_size_in_bytes,
  }


def device_peak_bytes() -> int | None:
  """Most bytes this process has held on the device so far; None where the device does not count."""
  statistics_ = jax.local_devices()[0].memory_stats() or {}
  return statistics_.get("peak_bytes_in_use")


def relative_error(got, want) -> float:
  """Frobenius norm of the difference over that of `want`, both read as float32."""
  got, want = jnp.asarray(got, jnp.float32), jnp.asarray(want, jnp.float32)
  norm = float(jnp.linalg.norm(want))
  return float(jnp.linalg.norm(got - want)) / norm if norm else float(jnp.linalg.norm(got))
