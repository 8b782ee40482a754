"""A disk that is full, as far as a program can tell."""

import contextlib
import resource


@contextlib.contextmanager
def no_file_above(size):
  """The operating system refuses to let a file grow above `size` bytes, as a full disk would."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
