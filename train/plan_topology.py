"""Machines that are not here, as targets of the compiler.

`v5p:8x8x8` is a slice of 512 chips, `v5p:8x8x8*2` two slices, `h200:8` eight GPUs of one host.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from train.chips import CHIPS
from train.errors import UsageError

# What the driver reports for an H200; the compiler reads nothing else about it.
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


class Topology(NamedTuple):
  name: str  # as given
  platform: str  # what JAX lowers for: "tpu" or "cuda"
  devices: Sequence[Any]  # as jax.devices() has them
  memory: int  # bytes of one device


def problem(name: str) -> str | None:
  """What is wrong with the text of a topology, in a sentence; None if nothing is."""
  chip, _, shape = name.partition(":")
  examples = ", ".join(c.example for c in CHIPS.values())
  if chip not in CHIPS:
    return f"--topology {name}: accepted are chips {', '.join(CHIPS)}, as in {examples}."
  sides = "x".join([r"[1-9]\d*"] * CHIPS[chip].dimensions)
  slices = "" if chip == "h200" else r"(\*[1-9]\d*)?"
  if not re.fullmatch(sides + slices, shape):
    return f"--topology {name}: {chip} takes a shape as in {CHIPS[chip].example}."
  package = "jax_cuda13_plugin" if chip == "h200" else "libtpu"
  if importlib.util.find_spec(package) is None:
    extra = "cuda" if chip == "h200" else "tpu"
    return (
      f"--topology {name} compiles with the package {package}, which is not installed; "
      f"`pip install '.[{extra}]'` brings it, no {extra.upper()} device is needed."
    )
  return None


def open_topology(name: str) -> Topology:
  """The devices of a sound name (see `problem`). Raises UsageError where the compiler has none.

  This process is kept from any real device: the host compiles.
  """
  chip, _, shape = name.partition(":")
  one_slice, _, slices = name.partition("*")
  # Two processes that compile at once fight over a lock file; no cloud is asked for metadata.
  os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
  # Of this host, which has none; without them libtpu complains on the standard error.
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
  jax.config.update("jax_platforms", "cpu")
  try:
    if chip == "h200":
      found = topologies.get_topology_desc(
        "", platform="cuda", target_config=_H200, topology=f"1x1x{shape}"
      )
    else:
      found = topologies.get_topology_desc(one_slice, platform="tpu", num_slices=int(slices or "1"))
  except (RuntimeError, ValueError, NotImplementedError) as error:
    first = str(error).strip().splitlines()[0].rstrip(".")
    raise UsageError([f"--topology {name} is not one that the compiler knows: {first}."]) from error
  platform = "cuda" if chip == "h200" else "tpu"
  return Topology(name, platform, found.devices, CHIPS[chip].memory)
