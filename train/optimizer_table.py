"""Which parameter the optimizer treats how, as text."""

from typing import Any

from configs.schema import Settings
from deepseek_jax.optim.partition import rows, table


def optimizer_table(params: Any, settings: Settings) -> str:
  """Aligned columns, one line for the parameters of a role; `params` are arrays or shapes."""
  words = table(rows(params, settings.optim, settings.model.engram))
  widths = [max(map(len, column)) for column in zip(*words, strict=True)]
  line = lambda row: "  ".join(w.ljust(width) for w, width in zip(row, widths, strict=True))
  return "\n".join(line(row).rstrip() for row in words)
