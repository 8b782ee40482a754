"""A tokenizer for text of others: what spells a special token stays text."""

import json

from tokenizers import Tokenizer

OPENING = "<[｜|"  # what names of special tokens begin with


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
  """The same tokenizer without a limit of length, which makes no special token of any text.

  `special` alone does not say which ones text must not become: the release calls <think> an
  ordinary token. Added tokens that do not look like markup still are found in text, for some
  tokenizers keep runs of spaces there. None is taken away: the library would number the others
  anew.
  """
  values = json.loads(tokenizer.to_str())
  for token in values["added_tokens"]:
    token["special"] |= token["content"][:1] in OPENING
  values["truncation"] = values["padding"] = None
  plain = Tokenizer.from_str(json.dumps(values))
  plain.encode_special_tokens = True
  return plain
