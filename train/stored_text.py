"""The tokenizer that a stored model reads and writes with: that of the data it was trained on."""

from typing import NamedTuple

from tokenizers import Tokenizer

from data.errors import DataError
from data.plain_tokenizer import plain_tokenizer
from data.prepared import TOKENIZER, Prepared, load_prepared
from deepseek_jax.checkpoint import CheckpointError, restore_step
from deepseek_jax.ngram import NgramHash
from train.errors import UsageError
from train.stored_model import StoredModel


class StoredText(NamedTuple):
  prepared: Prepared
  tokenizer: Tokenizer
  plain: Tokenizer  # the same, for text that may spell special tokens
  hashing: NgramHash | None  # Engram's; None for a model without tables


def open_text(model: StoredModel, data: str | None) -> StoredText:
  """The tokenizer of a folder that `prepare` wrote, and the Engram hash that goes with it.

  Args:
    model: that is to use them.
    data: what --data names; None takes the folder of the run that the model is of.

  Raises: UsageError for a folder without a tokenizer, and for one that does not fit the model.
  """
  if data is None and model.settings is not None:
    data = next(iter(model.settings.data.paths), None)
  if data is None:
    raise UsageError([f"{model.path} names no data: --data must name the tokenizer's."])
  prepared, tokenizer = _read(data)
  if prepared.vocab > model.cfg.vocab:
    raise UsageError(
      [
        f"The tokenizer in {data} has {prepared.vocab} tokens, the model's vocabulary "
        f"{model.cfg.vocab}."
      ]
    )
  try:
    known = None if model.settings is None else _trained_with(model)
    if known not in (None, prepared.tokenizer_sha256):
      raise UsageError([f"{model.path} was trained with another tokenizer than that in {data}."])
    engram = model.cfg.engram
    hashing = NgramHash(engram, prepared.compressed_id()) if engram.layers else None
  except (CheckpointError, DataError, ValueError) as error:
    raise UsageError([str(error)]) from error
  return StoredText(prepared, tokenizer, plain_tokenizer(tokenizer), hashing)


def _trained_with(model: StoredModel) -> str | None:
  """SHA-256 of the tokenizer, where the step says it."""
  return restore_step(model.path, {}, verify=False).data.get("tokenizer")


def _read(data: str) -> tuple[Prepared, Tokenizer]:
  try:
    prepared = load_prepared(data)
    return prepared, Tokenizer.from_buffer((prepared.folder / TOKENIZER).read_bytes())
  except FileNotFoundError:
    problem = f"There is no tokenizer: {data} is no folder that `prepare` has finished."
    raise UsageError([problem, "--data names another one."]) from None
  except OSError as error:
    raise UsageError([f"{data} cannot be read: {error.strerror}."]) from error
  except DataError as error:
    raise UsageError([str(error)]) from error
  except Exception as error:  # the library raises no other
    raise UsageError([f"{data}/{TOKENIZER} is no readable tokenizer: {error}."]) from error
