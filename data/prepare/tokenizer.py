"""The tokenizer of a preparation: trained here, or any given tokenizer.json."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data.chat.markup import Mark
from data.errors import RequestError
from data.plain_tokenizer import plain_tokenizer

# The release's names (model.md section 4.1), at its ids 0, 1, 2.
BOS, EOS, PAD = Mark.BOS.value, Mark.EOS.value, "<｜▁pad▁｜>"
CHAT_TOKENS = tuple(m.value for m in Mark if m not in (Mark.BOS, Mark.EOS))  # at the ids from 3 on
SMALLEST_VOCAB = 256 + 3  # every byte, and the three above
LARGEST_VOCAB = 2**24  # the trainer reserves memory for all of them; no tokenizer has a tenth

# Under which names other tokenizers keep the same three, the likeliest first.
KNOWN_NAMES = {
  "bos": (BOS, "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[CLS]"),
  "eos": (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
  "pad": (PAD, "<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<unk>"),
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """A tokenizer with the ids that documents are framed with."""

  tokenizer: Tokenizer
  plain: Tokenizer  # the same, for text that may spell special tokens
  bos: int  # before every document; EOS where the tokenizer has no BOS
  eos: int  # after every document
  pad: int

  @property
  def size(self) -> int:
    """Largest token id + 1."""
    return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """int32 tokens of each text, between BOS and EOS."""
    encodings = self.plain.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([self.bos, *e.ids, self.eos], np.int32) for e in encodings]


def train_tokenizer(texts: Iterable[str], vocab: int, *, chat: bool = False) -> Tokenizer:
  """Byte-level BPE with at most `vocab` entries; digits in groups of at most three.

  Args:
    texts: what it learns from.
    vocab: entries, the special ones included.
    chat: whether the tokens of the chat format are among these.
  """
  tokenizer = Tokenizer(models.BPE())
  digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
  words = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab,
    special_tokens=[BOS, EOS, PAD, *(CHAT_TOKENS if chat else ())],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
  """Reads a tokenizer.json. Raises RequestError when it is none."""
  try:
    return Tokenizer.from_file(str(path))
  except Exception as error:  # noqa: BLE001 - the library raises no other
    raise RequestError(f"--tokenizer is {str(path)!r}, no readable tokenizer: {error}.") from None


def vocabulary(tokenizer: Tokenizer, stated: dict[str, str | None]) -> Vocabulary:
  """Finds BOS, EOS and pad by the names in `stated` ("bos", "eos", "pad"), or by known names.

  Raises: RequestError for a stated name that the tokenizer lacks, and where EOS or pad is neither
  stated nor known.
  """
  ids, problems = {}, []
  for role, known in KNOWN_NAMES.items():
    names = known if stated.get(role) is None else (stated[role],)
    found = [tokenizer.token_to_id(name) for name in names if name is not None]
    ids[role] = next((number for number in found if number is not None), None)
    if ids[role] is None and stated.get(role) is not None:
      problems.append(f"--{role}-token is {stated[role]!r}, which the tokenizer does not have.")
    elif ids[role] is None and role != "bos":
      problems.append(f"The tokenizer has none of the {role} tokens {known}: give --{role}-token.")
  if problems:
    raise RequestError(*problems)
  bos = ids["eos"] if ids["bos"] is None else ids["bos"]
  plain = plain_tokenizer(tokenizer)
  return Vocabulary(tokenizer, plain, bos=bos, eos=ids["eos"], pad=ids["pad"])
