"""What is known about the accelerators that can be planned for or launched on, in one table."""

from typing import NamedTuple


class Chip(NamedTuple):
  memory: int  # bytes that a program may use on one device
  dimensions: int  # numbers in its topologies
  per_host: int
  devices: int  # of one chip, as JAX counts
  example: str


_GIB = 2**30
# TPU memory is what libtpu 0.0.48 says is available when a program is too large; that of an H200 is
# what its driver reports. A tpu7x device is one of a chip's two cores: jax.experimental.topologies
# counts 16 for tpu7x:2x2x2. Hosts: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
CHIPS = {
  "v5e": Chip(int(15.75 * _GIB), 2, 4, 1, "v5e:4x4"),
  "v5p": Chip(int(95.73 * _GIB), 3, 4, 1, "v5p:8x8x8"),
  "v6e": Chip(int(31.24 * _GIB), 2, 4, 1, "v6e:16x16"),
  "tpu7x": Chip(int(94.74 * _GIB), 3, 4, 2, "tpu7x:4x4x4"),
  "h200": Chip(150_754_820_096, 1, 8, 1, "h200:8"),
}
