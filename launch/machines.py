"""What a run can be launched on: `v5p:8x8x8`, `v6e:16x16`, `tpu7x:4x4x4`, `h200:8`, and slices."""

import dataclasses
import math
import re
from typing import NamedTuple

from train.chips import CHIPS, Chip


class Kind(NamedTuple):
  chip: Chip
  flags: str  # the row of launch/xla_flags.py
  node: str  # the label of its nodes in GKE
  runtime: str | None  # software of a TPU VM; None: cannot be had as one


# Labels: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and /gpus. Runtimes, and that
# tpu7x is offered in GKE only: cloud.google.com/tpu/docs/runtimes and /queued-resources.
KINDS = {
  "v5p": Kind(CHIPS["v5p"], "v5p", "tpu-v5p-slice", "v2-alpha-tpuv5"),
  "v6e": Kind(CHIPS["v6e"], "v6e", "tpu-v6e-slice", "v2-alpha-tpuv6e"),
  "tpu7x": Kind(CHIPS["tpu7x"], "tpu7x", "tpu7x", None),
  "h200": Kind(CHIPS["h200"], "gpu", "nvidia-h200-141gb", None),
}
*_FIRST, _LAST = (kind.chip.example for kind in KINDS.values())
EXAMPLES = f"{', '.join(_FIRST)} or {_LAST}"


@dataclasses.dataclass(frozen=True)
class Machines:
  """`slices` times the same shape of chips.

  Raises: ValueError with one sentence if such a slice cannot exist.
  """

  name: str  # a key of KINDS
  shape: tuple[int, ...]
  slices: int = 1

  def __post_init__(self) -> None:
    chip = self.kind.chip
    if len(self.shape) != chip.dimensions:
      raise ValueError(
        f"--topology {self}: {self.name} has {chip.dimensions} dimensions, not "
        f"{len(self.shape)}; it is written as in {EXAMPLES}."
      )
    if self.is_gpu and self.slices > 1:
      raise ValueError(f"--slices is for TPUs; for more GPUs write {self.name}:16 and the like.")
    if self.chips > chip.per_host and self.chips % chip.per_host:
      raise ValueError(
        f"--topology {self} has {self.chips} chips, which hosts of {chip.per_host} cannot make up."
      )

  def __str__(self) -> str:
    return f"{self.name}:{self.topology}"

  @property
  def kind(self) -> Kind:
    return KINDS[self.name]

  @property
  def is_gpu(self) -> bool:
    return self.kind.flags == "gpu"

  @property
  def topology(self) -> str:
    return "x".join(map(str, self.shape))

  @property
  def chips(self) -> int:
    """Of one slice."""
    return math.prod(self.shape)

  @property
  def hosts(self) -> int:
    """Of one slice."""
    return max(1, self.chips // self.kind.chip.per_host)

  @property
  def chips_per_host(self) -> int:
    return self.chips // self.hosts

  @property
  def devices(self) -> int:
    """Of all slices, as JAX counts them."""
    return self.chips * self.kind.chip.devices * self.slices


def parse_machines(topology: str, slices: int = 1) -> Machines:
  """What `--topology KIND:SHAPE --slices N` means. Raises ValueError with one sentence."""
  name, _, shape = topology.partition(":")
  if name not in KINDS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
    raise ValueError(f"--topology must be written as in {EXAMPLES}, got {topology}.")
  return Machines(name, tuple(map(int, shape.split("x"))), slices)
