"""The JSON document of a benchmark that takes a configuration."""

import datetime
import json
import pathlib
from typing import Any

import jax

from train.settings import Arguments


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
