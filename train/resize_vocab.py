"""Whether a tokenizer fits a vocabulary that `convert` resizes, and the hash of Engram's tables."""

import pathlib

import numpy as np
from tokenizers import Tokenizer

from data.errors import RequestError
from data.prepare.compression import cached_compression_map
from data.prepare.tokenizer import load_tokenizer
from deepseek_jax.config import ModelConfig

TOKENIZER = "tokenizer.json"


def vocabulary_problems(
  vocab: int, tokenizer: str, cfg: ModelConfig, source: pathlib.Path
) -> list[str]:
  """Why embedding and head cannot have `vocab` rows for these tokens, in plain sentences.

  Args:
    vocab: rows that are asked for.
    tokenizer: path of the tokenizer.json of the resized model.
    cfg: of the release.
    source: folder of the release; a tokenizer.json there must agree on the tokens of both.
  """
  try:
    ours = load_tokenizer(pathlib.Path(tokenizer))
    theirs = load_tokenizer(source / TOKENIZER) if (source / TOKENIZER).is_file() else None
  except RequestError as error:
    return list(error.problems)
  problems, size = [], _size(ours)
  if size > vocab:
    problems.append(f"--resize-vocab is {vocab}, but {tokenizer} has {size} token ids.")
  if theirs is not None:
    problems += _first_difference(ours, theirs, tokenizer, source / TOKENIZER)
  if cfg.engram.layers:
    problems += _class_problems(cached_compression_map(ours, size), tokenizer, cfg)
  return problems


def _first_difference(
  ours: Tokenizer, theirs: Tokenizer, name: str, other: pathlib.Path
) -> list[str]:
  for token in range(min(_size(ours), _size(theirs))):
    new, old = ours.id_to_token(token), theirs.id_to_token(token)
    if new != old:
      return [f"Token {token} is {new!r} in {name} and {old!r} in {other}."]
  return []


def _class_problems(classes_V: np.ndarray, tokenizer: str, cfg: ModelConfig) -> list[str]:
  classes, known = int(classes_V.max()) + 1, cfg.engram.compressed_vocab
  if classes <= known:
    return []
  first = int(np.argmax(classes_V >= known))
  return [
    f"{tokenizer} has {classes} classes of tokens that read alike, and the hash of Engram's tables "
    f"is made for {known}; token {first} is the first one too many. Unused tokens may be renamed."
  ]


def _size(tokenizer: Tokenizer) -> int:
  return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
