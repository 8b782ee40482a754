"""What a benchmark is made of: cases, and the records that running them gives."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from tests.bench import measure


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of the release, or tiny ones with which every benchmark is tested on a CPU."""

  heads: int = 64
  width: int = 512
  chosen: int = 512
  window: int = 128
  indexer_heads: int = 32
  indexer_width: int = 128
  pool_blocks: int = 2048
  pool_block_size: int = 8
  model_width: int = 5120
  expert_width: int = 2304
  experts: int = 384
  experts_per_token: int = 6
  vocabulary: int = 129_280
  loss_chunk: int = 2048
  checked: int = 256  # queries, rows or tokens whose results are compared with float32


SIZES = {
  "release": Sizes(),
  "tiny": Sizes(
    heads=2, width=32, chosen=8, window=8, indexer_heads=2, indexer_width=16, pool_blocks=4,
    pool_block_size=2, model_width=32, expert_width=16, experts=4, experts_per_token=2,
    vocabulary=64, loss_chunk=16, checked=16,
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Request:
  """What the command line asks for."""

  sizes: Sizes
  tokens: tuple[int, ...]
  ratios: tuple[int, ...]  # tokens per entry
  selections: tuple[str, ...]  # "random", "clustered"
  implementations: tuple[str, ...]
  reference_tokens: int | None  # longest shape of "reference"; None where it was named

  def implementations_for(self, tokens: int) -> list[str]:
    """The readable references are slow and hold much; unless named, they run short shapes only."""
    longest = self.reference_tokens
    skip = longest is not None and tokens > longest
    return [name for name in self.implementations if not (skip and name == "reference")]


@dataclasses.dataclass(frozen=True)
class Case:
  """One function of one implementation at one shape.

  run is compiled with its arguments, which are made when the case's turn comes, and timed. flops
  counts its useful products. `errors` is given the compiled program and compares some of its
  results with float32: relative Frobenius norms by name. The bandwidth floor reads every input once
  and writes every output once.
  """

  shape: Mapping[str, Any]
  implementation: str
  what: str  # "forward", "forward+backward", ...
  run: Callable
  arguments: Callable[[], tuple]
  flops: float
  errors: Callable[[Callable], dict[str, float]] = lambda program: {}
  timed: bool = True  # False: only compiled, for its memory


def records(benchmark: str, cases: Iterable[Case], peaks: measure.Peaks) -> Iterator[dict]:
  """Runs the cases one after the other; one that fails leaves a record that says why."""
  for case in cases:
    head = {
      "benchmark": benchmark,
      "implementation": case.implementation,
      "what": case.what,
      **case.shape,
    }
    try:
      yield head | _measured(case, peaks)
    except NotImplementedError as refused:
      yield head | {"refused": _sentence(refused)}
    except Exception as error:  # noqa: BLE001 - the other cases still run
      yield head | {"error": _sentence(error)}


def _measured(case: Case, peaks: measure.Peaks) -> dict:
  arguments = case.arguments()
  compiled = jax.jit(case.run).lower(*arguments).compile()
  measured = measure.memory(compiled)
  if not case.timed:
    return measured | {"total_bytes": sum(measured.values())}
  taken = measure.seconds(compiled, *arguments)
  floor = (measured["argument_bytes"] + measured["output_bytes"]) / peaks.copy_bytes
  return measured | {
    "seconds": taken,
    "tflops_per_second": case.flops / taken / 1e12,
    "fraction_of_matrix_peak": case.flops / taken / peaks.matrix_flops,
    "fraction_of_bandwidth_floor": floor / taken,
    "device_peak_bytes": measure.device_peak_bytes(),
    "errors": case.errors(compiled),
  }


def _sentence(error: Exception) -> str:
  first_line = (str(error).splitlines() or [""])[0][:300]
  return f"{type(error).__name__}: {first_line}"
