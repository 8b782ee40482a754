"""Chips that are not here, as targets to compile for; compiled is not run.

Needs the extra packages that `.ci/run` lists: libtpu for TPUs, the CUDA 13 plug-in for the H200.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from train import plan_topology

# Smallest topology of each generation; one of its devices is the target. A v5p device is a chip, a
# tpu7x device is one of a chip's two cores.
_TPU_TOPOLOGY = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@functools.cache
def tpu(generation: str) -> jax.sharding.Mesh:
  """Mesh of one device of "v5p", "v6e" or "tpu7x"; skips the test where libtpu is missing."""
  return _mesh(tpus(generation)[:1])


def tpus(generation: str) -> Sequence[jax.Device]:
  """All devices of the smallest topology; skips the test where libtpu is missing."""
  pytest.importorskip("libtpu")
  return plan_topology.open_topology(_TPU_TOPOLOGY[generation]).devices


@functools.cache
def h200() -> jax.sharding.Mesh:
  """Mesh of one NVIDIA H200; skips the test where the CUDA 13 plug-in is missing."""
  return _mesh(h200s(1)[:1])


def h200s(count: int) -> Sequence[jax.Device]:
  """Devices of one host; skips the test where the CUDA 13 plug-in is missing."""
  pytest.importorskip("jax_cuda13_plugin")
  return plan_topology.open_topology(f"h200:{count}").devices


def _mesh(devices) -> jax.sharding.Mesh:
  return jax.sharding.Mesh(np.array(devices), ("device",))


@contextlib.contextmanager
def tracing_for(target: jax.sharding.Mesh):
  """Code that asks for the chip while it is traced is told the target, not this machine."""
  with jax.sharding.use_abstract_mesh(target.abstract_mesh):
    yield


def compile_for(target: jax.sharding.Mesh, fn: Callable, *shapes) -> jax.stages.Compiled:
  """Compiles fn for one device of the target.

  Args:
    target: tpu(...) or h200().
    fn: function of arrays and trees of arrays; one that is jitted keeps what it donates.
    *shapes: trees of jax.ShapeDtypeStruct, one for each argument of fn.

  Returns: the executable, with memory_analysis() and as_text(); it cannot run here.
  """
  sharding = jax.sharding.NamedSharding(target, jax.sharding.PartitionSpec())
  place = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
  platform = "tpu" if target.devices.flat[0].platform == "tpu" else "cuda"
  with tracing_for(target):
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    traced = jitted.trace(*jax.tree.map(place, shapes))
    return traced.lower(lowering_platforms=(platform,)).compile()
