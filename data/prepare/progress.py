"""How far a preparation is: one bar per phase on a terminal, one line per phase elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], None]


@contextlib.contextmanager
def phase(name: str, total: int | None = None) -> Iterator[Advance]:
  """Shows that `name` is being done; the value it gives is called with each bit of progress.

  Args:
    name: what is being done, as a heading.
    total: units until it is done; None when unknown.
  """
  console = Console(stderr=True)
  if not console.is_terminal:
    began = time.monotonic()
    yield lambda units: None
    console.print(f"{name}: {time.monotonic() - began:.1f} s", highlight=False, soft_wrap=True)
    return
  columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
  with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
    task = bar.add_task(name, total=total)
    yield lambda units: bar.update(task, advance=units)
    bar.update(task, total=1, completed=1)
