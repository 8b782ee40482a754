"""Chips that are not here, as targets to compile for; compiled is not run.

Needs the extra packages that `.ci/run` lists: libtpu for TPUs, the CUDA 13 plug-in for the H200.
"""

import contextlib
import functools
import os
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.experimental import topologies

# Smallest topology of each generation; one of its devices is the target. A v5p device is a chip, a
# tpu7x device is one of a chip's two cores.
_TPU_TOPOLOGY = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

# What the driver reports for the card; the compiler reads nothing else about it. Shared memory per
# block is the limit that a kernel that is too large runs into.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@functools.cache
def tpu(generation: str) -> jax.sharding.Mesh:
  """Mesh of one device of "v5p", "v6e" or "tpu7x"; skips the test where libtpu is missing."""
  return _mesh(tpus(generation)[:1])


def tpus(generation: str) -> list[jax.Device]:
  """All devices of the smallest topology; skips the test where libtpu is missing."""
  pytest.importorskip("libtpu")
  # Two processes that compile at once fight over a lock file; and no cloud is asked for metadata.
  os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  return topologies.get_topology_desc(_TPU_TOPOLOGY[generation], platform="tpu").devices


@functools.cache
def h200() -> jax.sharding.Mesh:
  """Mesh of one NVIDIA H200; skips the test where the CUDA 13 plug-in is missing."""
  return _mesh(h200s(1)[:1])


def h200s(count: int) -> list[jax.Device]:
  """Devices of one host; skips the test where the CUDA 13 plug-in is missing."""
  pytest.importorskip("jax_cuda13_plugin")
  return topologies.get_topology_desc(
    "", platform="cuda", target_config=_H200, topology=f"1x1x{count}"
  ).devices


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
    fn: function of arrays and trees of arrays.
    *shapes: trees of jax.ShapeDtypeStruct, one for each argument of fn.

  Returns: the executable, with memory_analysis() and as_text(); it cannot run here.
  """
  sharding = jax.sharding.NamedSharding(target, jax.sharding.PartitionSpec())
  place = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
  platform = "tpu" if target.devices.flat[0].platform == "tpu" else "cuda"
  with tracing_for(target):
    traced = jax.jit(fn).trace(*jax.tree.map(place, shapes))
    return traced.lower(lowering_platforms=(platform,)).compile()
