"""The Engram compression map: tokens that read alike share a class (model.md section 2.8.1)."""

import hashlib
import io

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepseek_jax.storage_path import cache_folder, write_atomically

RULE = 1  # to be raised when the map of a tokenizer changes
SPACE = "\ue000"  # stands for a lone space while the others are stripped
UNDECODABLE = "\ufffd"  # what decoding gives for a part of a UTF-8 sequence


def cached_compression_map(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
  """`compression_map`, which this machine makes once for each tokenizer.

  It lies in `compression` below the cache folder, under the tokenizer's SHA-256.
  """
  named = hashlib.sha256(f"{RULE} {vocab} {tokenizer.to_str()}".encode()).hexdigest()
  path = cache_folder() / "compression" / f"{named}.npy"
  if path.is_file():
    try:
      kept = np.load(path)
    except (ValueError, EOFError):  # not the file that was written
      kept = None
    if kept is not None and kept.shape == (vocab,):
      return kept
  compressed_id_V = compression_map(tokenizer, vocab)
  path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(path, _npy(compressed_id_V))
  return compressed_id_V


def compression_map(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
  """[V] int32 class of each token id; classes are numbered in order of first occurrence."""
  normalizer = normalizers.Sequence(
    [
      normalizers.NFKC(),
      normalizers.NFD(),
      normalizers.StripAccents(),
      normalizers.Lowercase(),
      normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
      normalizers.Replace(Regex(r"^ $"), SPACE),
      normalizers.Strip(),
      normalizers.Replace(SPACE, " "),
    ]
  )
  classes: dict[str | None, int] = {}
  compressed_id_V = np.empty(vocab, np.int32)
  for token in range(vocab):
    text = tokenizer.decode([token], skip_special_tokens=False)
    if UNDECODABLE in text:
      key = tokenizer.id_to_token(token)
    else:
      key = normalizer.normalize_str(text) or text
    compressed_id_V[token] = classes.setdefault(key, len(classes))
  return compressed_id_V


def _npy(values: np.ndarray) -> bytes:
  data = io.BytesIO()
  np.save(data, values)
  return data.getvalue()
