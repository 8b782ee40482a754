"""Shares of problems, with how far chance alone may move them."""

import math
from collections.abc import Sequence

import numpy as np


def share(name: str, right: Sequence[float]) -> dict[str, float]:
  """The mean of values in 0 ... 1 and its standard error, sqrt(variance / n)."""
  values = np.asarray(right, np.float64)
  error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
  return {name: float(np.mean(values)), f"{name}_standard_error": error}
