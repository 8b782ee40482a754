"""What benchmarks of a configuration have in common: their words, and their JSON document."""

import datetime
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from configs.schema import Settings
from train import settings as command_line
from train.errors import UsageError
from train.settings import Arguments


def read(words: Sequence[str], accepted: Sequence[str]) -> tuple[Settings, Arguments]:
  """The settings that --config and its overrides give, and what else was given.

  Raises: UsageError with every problem.
  """
  arguments = command_line.split(words, accepted, switches=())
  if arguments.problems:
    raise UsageError(arguments.problems)
  return command_line.load(arguments.values.get("--config"), arguments.overrides), arguments


def write(benchmark: str, arguments: Arguments, measured: dict[str, Any]) -> None:
  """Prints what was measured with what it belongs to, and writes it where --json says."""
  given = arguments.values
  document = {
    "benchmark": benchmark,
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "jax": jax.__version__,
    "config": given.get("--config"),
    "overrides": arguments.overrides,
    **measured,
  }
  text = json.dumps(document, indent=1)
  print(text, flush=True)
  if "--json" in given:
    pathlib.Path(given["--json"]).write_text(text + "\n")
