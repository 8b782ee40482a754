"""Which parameter the optimizer treats how, as text."""

from collections.abc import Sequence
from typing import Any

from configs.schema import Settings
from deepseek_jax.optim.frozen import frozen_names, is_frozen
from deepseek_jax.optim.partition import rows, table


def optimizer_table(params: Any, settings: Settings) -> str:
  """Aligned columns, one line for the parameters of a role; `params` are arrays or shapes."""
  frozen = frozen_names(settings.optim)
  still = lambda row: row._replace(rule="frozen", count=0, matrix=None, lr=0.0, decay=0.0)
  every = rows(params, settings.optim, settings.model.engram)
  return aligned(table([still(row) if is_frozen(row.role, frozen) else row for row in every]))


def aligned(words: Sequence[Sequence[str]]) -> str:
  """Rows of words as lines with columns."""
  widths = [max(map(len, column)) for column in zip(*words, strict=True)]
  line = lambda row: "  ".join(w.ljust(width) for w, width in zip(row, widths, strict=True))
  return "\n".join(line(row).rstrip() for row in words)
