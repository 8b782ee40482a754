"""XLA's flags per kind of device: the one table, printed by every launcher with --dry-run.

Only what the XLA or JAX documentation advises for a training run, or what a run of ours has shown
to be needed (docs/log.md), and only where it can matter; an unknown flag ends the process at its
start, so every name here is tried on the compilers we pin (tests/launch/test_xla_flags.py). What a
run got is in its environment.json.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Flag(NamedTuple):
  variable: str  # the environment variable that the compiler or JAX reads
  name: str | None  # None: the value is all of the variable
  value: str
  devices: int  # the fewest devices that it makes sense for
  slices: int  # likewise
  why: str

  def __str__(self) -> str:
    return self.value if self.name is None else f"--{self.name}={self.value}"


GPU = (
  Flag(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    None,
    "0.92",
    devices=1,
    slices=1,
    # docs.jax.dev/en/latest/gpu_memory_allocation.html: 75% unless told otherwise, and
    # configs/small.py needs 84% of an H200; what is left holds the driver's and NCCL's buffers.
    why="share of a GPU's memory that arrays may take",
  ),
  Flag(
    "XLA_FLAGS",
    "xla_allow_excess_precision",
    "false",
    devices=1,
    slices=1,
    # By default XLA drops a cast to bfloat16 and back, and then keeps the residual streams in
    # float32: 100 of 2,600 GB that a step of configs/small.py moves (docs/log.md).
    why="what the model rounds to bfloat16 is stored as bfloat16",
  ),
  Flag(
    "XLA_FLAGS",
    "xla_gpu_enable_triton_gemm",
    "false",
    devices=1,
    slices=1,
    # Trying Triton kernels for every product takes longer than compiling all the rest; docs/log.md.
    why="matrix products through cuBLAS, without a search",
  ),
  Flag(
    "XLA_FLAGS",
    "xla_gpu_enable_latency_hiding_scheduler",
    "false",
    devices=2,
    slices=1,
    # With it, the first step on two H200s never ended: ragged all-to-alls wait for each other on
    # the device, beside other collectives (docs/log.md).
    why="one collective at a time",
  ),
)
TPU = (
  Flag(
    "LIBTPU_INIT_ARGS",
    "xla_tpu_enable_async_all_to_all",
    "true",
    devices=2,
    slices=1,
    # openxla.org/xla/flags_guidance: default false, suggested true.
    why="computes while experts exchange tokens",
  ),
  Flag(
    "LIBTPU_INIT_ARGS",
    "xla_tpu_enable_data_parallel_all_reduce_opt",
    "true",
    devices=2,
    slices=2,
    # openxla.org/xla/flags_guidance, TPU XLA flags: overlaps all-reduces over the data-centre
    # network. Its companion for different sizes costs memory and is left out.
    why="computes while gradients travel between slices",
  ),
)
TABLE: dict[str, tuple[Flag, ...]] = {
  "cpu": (),
  "gpu": GPU,
  "v5p": TPU,
  "v6e": TPU,
  "tpu7x": TPU,
}


def flags(kind: str, *, devices: int, slices: int = 1) -> tuple[Flag, ...]:
  """The flags of a run on this many devices, in all slices together; `kind` is a key of TABLE."""
  return tuple(f for f in TABLE[kind] if devices >= f.devices and slices >= f.slices)


def variables(chosen: Sequence[Flag], own: Mapping[str, str]) -> dict[str, str]:
  """The environment variables that carry the flags.

  Args:
    chosen: from `flags`.
    own: the variables as the user has set them; a flag that is named there keeps the user's value.
  """
  texts = {flag.variable: own.get(flag.variable, "").split() for flag in chosen}
  for flag in reversed(chosen):
    words = texts[flag.variable]
    names = {word.lstrip("-").partition("=")[0] for word in words}
    is_set = bool(words) if flag.name is None else flag.name in names
    if not is_set:
      words.insert(0, str(flag))
  return {variable: " ".join(words) for variable, words in texts.items()}


def describe(kind: str, chosen: Sequence[Flag]) -> list[str]:
  """One line per flag, for people."""
  if not chosen:
    return [f"XLA flags for {kind}: none"]
  return [
    f"XLA flags for {kind}:",
    *(f"  {flag.variable} {flag}  ({flag.why})" for flag in chosen),
  ]
