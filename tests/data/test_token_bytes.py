"""Bytes of tokens: a text's tokens have as many together as the text has."""

import pytest
from tokenizers import Tokenizer, decoders, models

from data.plain_tokenizer import plain_tokenizer
from data.prepare.tokenizer import train_tokenizer, vocabulary
from data.token_bytes import token_bytes

TEXTS = ["expert router 12345\n", "größer, 東京 and  more\t<｜end▁of▁sentence｜>"]


@pytest.fixture(scope="module")
def vocab():
  return vocabulary(train_tokenizer(TEXTS * 3, 300), {})


@pytest.mark.parametrize("text", [*TEXTS, "", "naïve 🙂", " a  b"])
def test_the_tokens_of_a_text_have_its_bytes(text, vocab):
  bytes_V = token_bytes(vocab.plain, 310)
  (tokens,) = vocab.encode([text])
  assert bytes_V[tokens].sum() == len(text.encode())
  assert not bytes_V[[vocab.bos, vocab.eos, vocab.pad]].any() and not bytes_V[300:].any()


def test_an_added_token_that_is_text_has_its_bytes(vocab):
  tokenizer = Tokenizer.from_str(vocab.tokenizer.to_str())
  tokenizer.add_tokens(["    "])
  plain = plain_tokenizer(tokenizer)
  (token,) = plain.encode("    ", add_special_tokens=False).ids
  assert token_bytes(plain, token + 1)[token] == 4


def test_other_tokenizers_do_not_say():
  tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
  assert token_bytes(tokenizer, 1) is None
  tokenizer.decoder = decoders.Metaspace()
  assert token_bytes(tokenizer, 1) is None
