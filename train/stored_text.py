"""The tokenizer that a stored model reads and writes with: that of the data it was trained on."""

from typing import NamedTuple

from tokenizers import Tokenizer

from data.errors import DataError
from data.prepared import Prepared
from deepseek_jax.checkpoint import CheckpointError, read_document
from deepseek_jax.ngram import NgramHash
from train.errors import UsageError
from train.stored_model import StoredModel
from train.stored_tokenizer import open_tokenizer


class StoredText(NamedTuple):
  prepared: Prepared
  tokenizer: Tokenizer  # makes no special token of any text
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
  prepared, tokenizer = open_tokenizer(data)
  if prepared.vocab > model.cfg.vocab:
    raise UsageError(
      [
        f"The tokenizer in {data} has {prepared.vocab} tokens, the model's vocabulary "
        f"{model.cfg.vocab}."
      ]
    )
  try:
    of_step = {} if model.settings is None else read_document(model.path, "data")
    if of_step.get("tokenizer") not in (None, prepared.tokenizer_sha256):
      raise UsageError([f"{model.path} was trained with another tokenizer than that in {data}."])
    engram = model.cfg.engram
    hashing = NgramHash(engram, prepared.compressed_id()) if engram.layers else None
  except (CheckpointError, DataError, ValueError) as error:
    raise UsageError([str(error)]) from error
  return StoredText(prepared, tokenizer, hashing)
