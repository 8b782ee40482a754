"""A tokenizer for text of others: what spells a special token stays text."""

import json

from tokenizers import Tokenizer

OPENING, CLOSING = "<[｜|", ">]｜|"  # what the names of special tokens begin and end with


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
  """The same model without its added tokens, and without a limit of length.

  `special` does not say which ones text must not become: the release calls <think> an
  ordinary token. Those that are neither special nor in brackets are kept, for some tokenizers
  keep runs of spaces there.
  """
  values = json.loads(tokenizer.to_str())
  values["added_tokens"] = [
    token
    for token in values["added_tokens"]
    if not (
      token["special"] or (token["content"][0] in OPENING and token["content"][-1] in CLOSING)
    )
  ]
  values["truncation"] = values["padding"] = None
  return Tokenizer.from_str(json.dumps(values))
