"""A small preparation of real text, made once."""

import pathlib
import shutil
import sysconfig

import pytest

from data.config import DataConfig
from data.prepare.run import PrepareRequest, prepare

SLOTS = 64


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory) -> pathlib.Path:
  """Some twenty files of the standard library."""
  folder = tmp_path_factory.mktemp("text")
  for package in ("json", "wsgiref", "concurrent"):
    source = pathlib.Path(sysconfig.get_path("stdlib")) / package
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
  return folder


@pytest.fixture(scope="session")
def request_of(text_folder):
  """Builds requests for that text; keywords change them."""

  def build(**changes) -> PrepareRequest:
    fixed = {"tokenizer": "train:300", "slots": SLOTS, "validation_share": 0.25}
    return PrepareRequest(**{"source": f"folder:{text_folder}"} | fixed | changes)

  return build


@pytest.fixture(scope="session")
def prepared(request_of, tmp_path_factory):
  return prepare(request_of(), tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def config_of(prepared):
  """Builds configurations that read the small preparation; keywords change them."""

  def build(**changes) -> DataConfig:
    fixed = {"paths": (str(prepared.folder),), "slots": SLOTS, "batch_rows": 4, "shuffle_seed": 3}
    return DataConfig(**fixed | changes)

  return build
