"""Waits for the next element of an iterator, but not for ever."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

from data.errors import DataError


def next_within(iterator: Iterator, seconds: float) -> Any:
  """`next(iterator)`, including what that raises; DataError when it takes too long.

  After a stall the waiting thread is left behind: a blocked read cannot be interrupted. The program
  must then end without joining threads (os._exit), as Python would wait for that read.
  """
  answer: queue.SimpleQueue = queue.SimpleQueue()

  def ask() -> None:
    try:
      answer.put((next(iterator), None))
    except BaseException as error:  # noqa: BLE001 - raised where it is awaited
      answer.put((None, error))

  threading.Thread(target=ask, daemon=True, name="next-batch").start()
  try:
    value, error = answer.get(timeout=seconds)
  except queue.Empty:
    raise DataError(f"The data gave no batch for {seconds:g} seconds (data.stall_seconds).") from (
      None
    )
  if error is not None:
    raise error
  return value
