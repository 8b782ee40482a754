"""Tokenizers: ours gives back every byte, any other is taken as it is; the compression map."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from data.errors import RequestError
from data.prepare.compression import compression_map
from data.prepare.run import prepare
from data.prepare.tokenizer import BOS, EOS, PAD, train_tokenizer, vocabulary
from data.prepared import TOKENIZER

NOTHING_STATED = {"bos": None, "eos": None, "pad": None}


def word_level(*words: str) -> Tokenizer:
  vocab = {word: number for number, word in enumerate(words)}
  return Tokenizer(models.WordLevel(vocab, unk_token=words[0]))


def test_trained_tokenizer_gives_back_any_text():
  tokenizer = train_tokenizer(["some text to learn from, 2024 times"] * 9, 300)
  for text in ("  two  spaces\t\r\n", "zażółć 漢字 🙂", "1234567 x\x01\x7f", ""):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_ids_of_the_release():
  vocab = vocabulary(train_tokenizer(["text"], 259), NOTHING_STATED)
  assert (vocab.bos, vocab.eos, vocab.pad) == (0, 1, 2)


def test_text_that_spells_a_special_token_does_not_become_one():
  vocab = vocabulary(train_tokenizer(["text"], 259), NOTHING_STATED)
  (tokens,) = vocab.encode([f"a{EOS}{PAD}{BOS}b"])
  assert set(tokens[1:-1]).isdisjoint({0, 1, 2})
  assert (tokens[0], tokens[-1]) == (0, 1)


def test_a_given_tokenizer_is_kept_and_counts_by_its_contents(prepared, request_of, tmp_path):
  given = tmp_path / "given.json"
  given.write_bytes((prepared.folder / TOKENIZER).read_bytes())
  again = prepare(request_of(tokenizer=str(given)), tmp_path / "out")
  assert again.tokenizer_sha256 == prepared.tokenizer_sha256
  assert again.fingerprint == prepared.fingerprint
  moved = given.rename(tmp_path / "moved.json")
  assert request_of(tokenizer=str(moved)).identity() == again.request


def test_names_of_other_tokenizers_are_known_or_asked_for():
  known = vocabulary(word_level("<unk>", "</s>", "word"), NOTHING_STATED)
  assert (known.bos, known.eos, known.pad) == (1, 1, 0)
  strange = word_level("[UNK]", "STOP", "word")
  with pytest.raises(RequestError) as caught:
    vocabulary(strange, NOTHING_STATED)
  assert ["--eos-token" in caught.value.problems[0], "--pad-token" in caught.value.problems[1]]
  stated = vocabulary(strange, {"bos": None, "eos": "STOP", "pad": "[UNK]"})
  assert (stated.eos, stated.pad) == (1, 0)
  with pytest.raises(RequestError, match="--eos-token is 'HALT'"):
    vocabulary(strange, {"bos": None, "eos": "HALT", "pad": "[UNK]"})


def test_tokens_that_read_alike_share_a_class():
  words = ["the", "The", " THE", "thé", "\t\n", " ", "x", "\ufffd", "\u0301"]
  classes = compression_map(word_level(*words), len(words))
  np.testing.assert_array_equal(classes, [0, 0, 0, 0, 1, 1, 2, 3, 4])


def test_only_added_tokens_that_are_no_markup_are_found_in_text():
  tokenizer = train_tokenizer(["text"], 259)
  tokenizer.add_tokens(["<think>", "<dsml:", "｜x｜", "    "])
  tokenizer.enable_truncation(3)
  vocab = vocabulary(tokenizer, NOTHING_STATED)
  spaces = tokenizer.token_to_id("    ")
  (tokens,) = vocab.encode(["a    <think> <dsml: ｜x｜ b"])
  added = [token for token in tokens.tolist() if token >= 259]
  assert added == [spaces]
  assert tokenizer.decode(tokens[1:-1]) == "a    <think> <dsml: ｜x｜ b"
