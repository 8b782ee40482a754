"""A small tokenizer that has the marks of the chat format."""

import pytest

from data.chat.tokens import chat_tokenizer
from data.prepare.tokenizer import train_tokenizer

TEXT = ["some text to learn from, 2024 times"] * 9


@pytest.fixture(scope="session")
def encoder():
  return chat_tokenizer(train_tokenizer(TEXT, 300, chat=True))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv("DEEPSEEK_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
