"""Tables of cases of which `make test` runs a part: the others are for `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], fast: int) -> list[Any]:
  """The first `fast` cases as they are, the others marked as slow; a tuple has several values."""
  parts = [case if isinstance(case, tuple) else (case,) for case in cases]
  marks = lambda number: () if number < fast else pytest.mark.slow
  return [pytest.param(*part, marks=marks(number)) for number, part in enumerate(parts)]
