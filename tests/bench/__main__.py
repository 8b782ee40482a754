"""Speed, memory and error of the ops that carry the model, per implementation and shape.

  python -m tests.bench attention|indexer|experts|loss --json F [--tokens 4096,16384,65536]
      [--ratio 1,2] [--selection random,clustered] [--implementation a,b] [--repeat 3]
  python -m tests.bench schedule --chip v5p,v6e,tpu7x --json F
  python -m tests.bench step --config configs/small.py [--steps 30] [--profile DIR] [--json F]
  python -m tests.bench replay --config configs/small.py [--responses 4] [--steps 30] [--json F]
  python -m tests.bench decode --config configs/small.py [--contexts 4096,262144] [--json F]
  python -m tests.bench optimizer --config configs/small.py [--steps 10] [--json F]
  python -m tests.bench convert --folder DIR [--gigabytes 3] [--json F]
  python -m tests.bench paired_kl --aware RUN[,RUN] --plain RUN[,RUN] [--json F]

`make bench` runs the first four; on a CPU with tiny sizes, which says only that they work. Prints
a table and writes one JSON document: date, device, driver, jax version, what the device can do at
most (a bfloat16 matrix product and a copy, measured in the same run), and a record per
implementation and shape. A case that fails or is refused leaves a record that says why. `schedule`
needs no accelerator: it reports cycles of the TPU kernels from the compiler's final schedule.
`step` measures the whole training step (tests/bench/step.py), `replay` what it saves with replay,
`decode` prefill and the tokens behind it, `optimizer` an update alone, `convert` the memory that
conversion of a released checkpoint takes, `paired_kl` what fine-tuning with replay changes about
how far a server's forward is from the exact one.
"""

import argparse
import datetime
import importlib
import json
import pathlib
import subprocess
import sys

import jax
from rich.console import Console

from deepseek_jax.ops import dispatch
from tests.bench import case, measure, report
from train.errors import Exit, UsageError

_MEASURED = ("attention", "indexer", "experts", "loss")
_OWN_WORDS = ("step", "replay", "decode", "optimizer", "convert", "paired_kl")
_CHIPS = ("v5p", "v6e", "tpu7x")
_SELECTIONS = ("random", "clustered")
_REFERENCE_TOKENS = 4096
_ACCELERATOR = "release", (4096, 16_384, 65_536)
_CPU = "tiny", (64,)
# Beginnings of names that are not tried unless asked for: they would be refused or, on a CPU,
# interpreted.
_FOREIGN = {
  "cpu": ("pallas_", "ragged_dot", "tokamax"),
  "gpu": ("pallas_tpu", "ragged_dot", "tokamax"),
  "tpu": ("pallas_gpu", "pallas_triton"),
}


def main(arguments: list[str] | None = None) -> int:
  words = sys.argv[1:] if arguments is None else arguments
  if words[:1] and words[0] in _OWN_WORDS:
    try:
      return importlib.import_module(f"tests.bench.{words[0]}").main(words[1:])
    except UsageError as error:
      print(error)
      return Exit.USAGE
  parser = _parser()
  options = parser.parse_args(words)
  if options.tokens and min(options.tokens) < max(options.ratio):
    parser.error(f"--tokens {min(options.tokens)} has no entry at --ratio {max(options.ratio)}")
  document = {
    "benchmark": options.benchmark,
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "jax": jax.__version__,
    "records": [],
  }
  console = Console(width=max(Console().width, report.WIDTH))
  try:
    if options.benchmark == "schedule":
      schedule = importlib.import_module("tests.bench.schedule")
      document["records"] = schedule.run(options.chip)
    else:
      _measure(options, document, console)
  finally:
    if options.json:
      options.json.write_text(json.dumps(document, indent=1) + "\n")
  console.print(report.table(document))
  return int(any("error" in record for record in document["records"]))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("benchmark", choices=(*_MEASURED, "schedule"))
  parser.add_argument("--json", type=_writable_file)
  parser.add_argument("--tokens", type=_numbers, help="default: 4096,16384,65536; on a CPU 64")
  parser.add_argument("--ratio", type=_numbers, default=(1, 2), help="tokens per entry")
  parser.add_argument("--selection", type=_names_of(_SELECTIONS), default=_SELECTIONS)
  parser.add_argument(
    "--implementation",
    type=lambda text: tuple(text.split(",")),
    help="default: all that this device may use",
  )
  parser.add_argument("--repeat", type=_number, default=1, help="rounds over all cases")
  parser.add_argument("--sizes", choices=case.SIZES, help="default: release; on a CPU tiny")
  parser.add_argument("--chip", type=_names_of(_CHIPS), default=_CHIPS, help="for schedule")
  return parser


def _number(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is not one of 1, 2, ...")
  return int(text)


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(_number(word) for word in text.split(","))


def _names_of(known: tuple[str, ...]):
  def names(text: str) -> tuple[str, ...]:
    if unknown := [word for word in text.split(",") if word not in known]:
      raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(text.split(","))

  return names


def _writable_file(text: str) -> pathlib.Path:
  """Tried before anything is measured."""
  path = pathlib.Path(text)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
  except OSError as error:
    raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
  return path


def _measure(options, document: dict, console: Console) -> None:
  benchmark = importlib.import_module(f"tests.bench.{options.benchmark}")
  device = dispatch.device()
  sizes, tokens = _CPU if device.platform == "cpu" else _ACCELERATOR
  sizes = options.sizes or sizes
  document |= {"device": device.kind, "driver": _driver(), "sizes": sizes, "peaks": []}
  foreign = _FOREIGN[device.platform]
  own = tuple(name for name in benchmark.IMPLEMENTATIONS if not name.startswith(foreign))
  request = case.Request(
    sizes=case.SIZES[sizes],
    tokens=options.tokens or tokens,
    ratios=options.ratio,
    selections=options.selection,
    implementations=options.implementation or own,
    reference_tokens=None if options.implementation else _REFERENCE_TOKENS,
  )
  for turn in range(options.repeat):
    peaks = measure.peaks()
    document["peaks"].append(peaks._asdict())
    for record in case.records(options.benchmark, benchmark.cases(request), peaks):
      document["records"].append(record | {"round": turn})
      console.print(*report.row(record), sep=" | ", soft_wrap=True, highlight=False)


def _driver() -> str | None:
  """Version of the NVIDIA driver; None where there is none to ask."""
  command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
  try:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return answer.stdout.split("\n")[0].strip()


if __name__ == "__main__":
  raise SystemExit(main())
