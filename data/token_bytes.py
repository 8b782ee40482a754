"""How many bytes of text each token stands for."""

import json

import numpy as np
from tokenizers import Tokenizer


def token_bytes(tokenizer: Tokenizer, vocab: int) -> np.ndarray | None:
  """[V] int32 bytes of each token id; 0 for special ones and ids without a token.

  Only of a byte-level tokenizer, in whose entries a character stands for a byte; None for others,
  whose entries do not say what they are in text.
  """
  values = json.loads(tokenizer.to_str())
  if not _is_byte_level(values.get("decoder") or {}):
    return None
  bytes_V = np.zeros(vocab, np.int32)
  for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
    bytes_V[token] = len(text)
  for added in values["added_tokens"]:
    bytes_V[added["id"]] = 0 if added["special"] else len(added["content"].encode())
  return bytes_V


def _is_byte_level(decoder: dict) -> bool:
  parts = decoder.get("decoders", [decoder])
  return any(part.get("type") == "ByteLevel" for part in parts)
