"""What variants came to, as one table."""

import json
import pathlib
from typing import Any

from configs.ablation import VARIANTS
from train.errors import UsageError

_COLUMNS = (
  "variant",
  "activated parameters",
  "training FLOPs a token",
  "prefill FLOPs a token",
  "KV bytes a token",
  "bits per byte (each seed)",
  "tokens/s",
)
_SAME = ("tokens", "data", "seeds")  # what must be equal for a comparison


def table(folder: pathlib.Path) -> str:
  """Markdown: one row for each variant, in their order; those without a file say so.

  Bits per byte are the mean over seeds, with each seed's behind it.
  Raises: UsageError that names every file which is no result or does not fit the others.
  """
  results = _read(folder)
  lines = [
    f"| {' | '.join(_COLUMNS)} |",
    f"|{'---|' * len(_COLUMNS)}",
  ]
  for name in [*VARIANTS, *sorted(set(results) - set(VARIANTS))]:
    lines.append(_row(name, results.get(name)))
  return "\n".join(lines)


def _row(name: str, result: dict[str, Any] | None) -> str:
  about = VARIANTS.get(name, name)
  if result is None:
    return f"| {about} | not run | | | | | |"
  bits = result["bits_per_byte"]
  each = ", ".join(f"{b:.4f}" for b in bits)
  cells = [
    about,
    f"{result['activated_parameters'] / 1e6:.1f} M",
    f"{result['training_flops_per_token'] / 1e6:.0f} M",
    f"{result['prefill_flops_per_token'] / 1e6:.1f} M",
    f"{result['kv_bytes_per_token']:.0f}",
    f"{sum(bits) / len(bits):.4f} ({each})",
    f"{result['tokens_per_second']:,.0f}",
  ]
  return f"| {' | '.join(cells)} |"


def _read(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  results, problems = {}, []
  for path in sorted(folder.glob("*.json")):
    try:
      result = json.loads(path.read_text())
      _row(result["variant"], result)
      results.setdefault(result["variant"], result)
      first = next(iter(results.values()))
      problems += [
        f"{path} was trained with other {key} than {first['variant']}."
        for key in _SAME
        if result[key] != first[key]
      ]
      if results[result["variant"]] is not result:
        problems.append(f"{path} is a second result of {result['variant']}.")
    except (ValueError, KeyError, TypeError, AttributeError):
      problems.append(f"{path} is no result of ablate.")
  if problems:
    raise UsageError(problems)
  return results
