"""One packed row as bytes: its documents or conversations with their boundaries, and back.

Little endian, in this order, n being the number of documents:
  n uint32 | length of each uint32 | next token of each int32, -1 none | tokens, uint16 or uint32
and for conversations:
  2^32 - 1 uint32 | n uint32 | length of each uint32 | responses of each uint32 | first and one past
  the last token of each response, uint32 | a bit for each token, 1 learned | tokens, as above
"""

from collections.abc import Sequence

import numpy as np

from data.conversation import Conversation
from deepseek_jax.layout import Document

_CONVERSATIONS = 2**32 - 1  # in the place of a number of documents


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


def encode_conversations(conversations: Sequence[Conversation], dtype: str) -> bytes:
  """Bytes of a row of conversations; `dtype` as for encode_row."""
  masks = [np.asarray(one.loss_mask, bool) for one in conversations]
  parts = [
    np.array([_CONVERSATIONS, len(conversations)], "<u4"),
    np.array([len(one.tokens) for one in conversations], "<u4"),
    np.array([len(one.turns) for one in conversations], "<u4"),
    np.array([border for one in conversations for turn in one.turns for border in turn], "<u4"),
    np.packbits(np.concatenate([np.zeros(0, bool), *masks])),
    *(np.asarray(one.tokens, _on_disk(dtype)) for one in conversations),
  ]
  return b"".join(part.tobytes() for part in parts)


def decode_row(record: bytes, dtype: str) -> list[Document] | list[Conversation]:
  """What `encode_row` or `encode_conversations` was given, tokens as int32."""
  count = int(np.frombuffer(record, "<u4", 1)[0])
  if count == _CONVERSATIONS:
    return _decode_conversations(record, dtype)
  lengths = np.frombuffer(record, "<u4", count, 4)
  following = np.frombuffer(record, "<i4", count, 4 + 4 * count)
  tokens = np.frombuffer(record, _on_disk(dtype), offset=4 + 8 * count).astype(np.int32)
  pieces = np.split(tokens, np.cumsum(lengths)[:-1]) if count else []
  return [Document(piece, int(after)) for piece, after in zip(pieces, following, strict=True)]


def _decode_conversations(record: bytes, dtype: str) -> list[Conversation]:
  count, offset = int(np.frombuffer(record, "<u4", 1, 4)[0]), 8
  lengths, responses = np.frombuffer(record, "<u4", 2 * count, offset).reshape(2, count)
  offset += 8 * count
  borders = np.frombuffer(record, "<u4", 2 * int(responses.sum()), offset).reshape(-1, 2).tolist()
  offset += 8 * len(borders)
  total = int(lengths.sum())
  bits = np.frombuffer(record, np.uint8, -(-total // 8), offset)
  mask = np.unpackbits(bits, count=total).astype(bool)
  tokens = np.frombuffer(record, _on_disk(dtype), total, offset + len(bits)).astype(np.int32)
  found, at, turn = [], 0, 0
  for length, own in zip(lengths.tolist(), responses.tolist(), strict=True):
    turns = tuple((begin, end) for begin, end in borders[turn : turn + own])
    found.append(Conversation(tokens[at : at + length], mask[at : at + length], turns))
    at, turn = at + length, turn + own
  return found


def _on_disk(dtype: str) -> np.dtype:
  return np.dtype(dtype).newbyteorder("<")
