"""One packed row as bytes: its documents with their boundaries, and back.

Little endian, in this order, n being the number of documents:
  n uint32 | length of each uint32 | next token of each int32, -1 none | tokens, uint16 or uint32
"""

from collections.abc import Sequence

import numpy as np

from deepseek_jax.layout import Document


def token_dtype(vocab: int) -> str:
  """Name of the narrowest unsigned type that holds every token id."""
  return "uint16" if vocab <= 2**16 else "uint32"


def encode_row(documents: Sequence[Document], dtype: str) -> bytes:
  """Bytes of a row; `dtype` is what `token_dtype` gave for the vocabulary."""
  lengths = [len(document.tokens) for document in documents]
  following = [document.next_token for document in documents]
  parts = [
    np.array([len(documents), *lengths], "<u4"),
    np.array(following, "<i4"),
    *(np.asarray(document.tokens, _on_disk(dtype)) for document in documents),
  ]
  return b"".join(part.tobytes() for part in parts)


def decode_row(record: bytes, dtype: str) -> list[Document]:
  """The documents that `encode_row` was given, tokens as int32."""
  count = int(np.frombuffer(record, "<u4", 1)[0])
  lengths = np.frombuffer(record, "<u4", count, 4)
  following = np.frombuffer(record, "<i4", count, 4 + 4 * count)
  tokens = np.frombuffer(record, _on_disk(dtype), offset=4 + 8 * count).astype(np.int32)
  pieces = np.split(tokens, np.cumsum(lengths)[:-1]) if count else []
  return [Document(piece, int(after)) for piece, after in zip(pieces, following, strict=True)]


def _on_disk(dtype: str) -> np.dtype:
  return np.dtype(dtype).newbyteorder("<")
