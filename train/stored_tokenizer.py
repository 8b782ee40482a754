"""The tokenizer of prepared data, for text that comes from a user."""

from tokenizers import Tokenizer

from data.errors import DataError
from data.plain_tokenizer import plain_tokenizer
from data.prepared import TOKENIZER, Prepared, load_prepared
from train.errors import UsageError


def open_tokenizer(data: str) -> tuple[Prepared, Tokenizer]:
  """A folder that `prepare` wrote, and its tokenizer, which makes no special token of any text.

  Raises: UsageError for a folder that is none, or cannot be read.
  """
  try:
    prepared = load_prepared(data)
    tokenizer = Tokenizer.from_buffer((prepared.folder / TOKENIZER).read_bytes())
  except FileNotFoundError:
    problem = f"There is no tokenizer: {data} is no folder that `prepare` has finished."
    raise UsageError([problem, "--data names another one."]) from None
  except OSError as error:
    raise UsageError([f"{data} cannot be read: {error.strerror}."]) from error
  except DataError as error:
    raise UsageError([str(error)]) from error
  except Exception as error:  # the library raises no other
    raise UsageError([f"{data}/{TOKENIZER} is no readable tokenizer: {error}."]) from error
  return prepared, plain_tokenizer(tokenizer)
