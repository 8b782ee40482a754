"""The Engram compression map: tokens that read alike share a class (model.md section 2.8.1)."""

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

SPACE = "\ue000"  # stands for a lone space while the others are stripped
UNDECODABLE = "\ufffd"  # what decoding gives for a part of a UTF-8 sequence


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
