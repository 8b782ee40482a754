"""Standard output and error that may go away while a program runs."""

import os
from typing import TextIO


class Screen:
  """A text stream that falls silent after the first write that fails.

  A reader that has seen enough (`| head`), a full disk behind `>` or a closed terminal must not end
  a run of days. Everything but writing is the stream's own.
  """

  def __init__(self, stream: TextIO) -> None:
    self._stream = stream

  def __getattr__(self, name: str):
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    try:
      return self._stream.write(text)
    except OSError:
      self._silence()
      return len(text)

  def flush(self) -> None:
    try:
      self._stream.flush()
    except OSError:
      self._silence()

  def _silence(self) -> None:
    # What the stream still holds goes there too, and so does what Python flushes at the end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, self._stream.fileno())
    os.close(nowhere)
