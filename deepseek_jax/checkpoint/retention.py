"""Which complete steps may be deleted."""

from collections.abc import Sequence


def expendable(steps: Sequence[int], *, keep_last: int, keep_every: int) -> list[int]:
  """Steps that neither policy keeps, ascending; never the newest.

  Args:
    steps: complete steps.
    keep_last: the newest so many stay, at least 1.
    keep_every: multiples of it stay for good; 0 keeps none beyond `keep_last`.
  """
  old = sorted(steps)[: -max(1, keep_last)]
  return [step for step in old if not keep_every or step % keep_every]
