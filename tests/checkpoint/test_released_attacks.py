"""Whatever a folder holds that calls itself a released checkpoint: one sentence, or the model."""

import contextlib
import json
import os
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_jax.checkpoint import CheckpointError
from deepseek_jax.checkpoint.released import load_released
from deepseek_jax.checkpoint.released_folder import INDEX, open_released
from deepseek_jax.checkpoint.safetensors_file import read_headers

CASE = pathlib.Path(__file__).resolve().parents[1] / "reference" / "quantized_model"
WEIGHTS = "weights.safetensors"


def put(folder, content):
  """Replaces the file of weights."""
  (folder / WEIGHTS).write_bytes(content)


def parts(folder):
  """Header, as values, and tensors of the file of weights."""
  content = (folder / WEIGHTS).read_bytes()
  length = int.from_bytes(content[:8], "little")
  return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_header(folder, text):
  data = parts(folder)[1]
  text = text if isinstance(text, bytes) else json.dumps(text).encode()
  put(folder, len(text).to_bytes(8, "little") + text + data)


def edit_header(change):
  def damage(folder):
    header = parts(folder)[0]
    change(header)
    put_header(folder, header)

  return damage


def duplicate_in_header(folder):
  header = json.dumps(parts(folder)[0])
  entry = header[header.index('"norm.weight"') :].split("}", 1)[0]
  put_header(folder, f"{header[:-1]}, {entry}}}}}".encode())


def index(**changes):
  """An index of the file, with other entries."""

  def damage(folder):
    names = read_headers(folder / WEIGHTS)
    content = {"weight_map": dict.fromkeys(names, WEIGHTS) | changes}
    (folder / INDEX).write_text(json.dumps(content))

  return damage


def duplicate_in_index(folder):
  index()(folder)
  text = (folder / INDEX).read_text()
  (folder / INDEX).write_text(text.replace("}}", f', "norm.weight": "{WEIGHTS}"}}}}'))


def outside(folder):
  shutil.copy(folder / WEIGHTS, folder.parent / "other.safetensors")
  index(**{"norm.weight": "../other.safetensors"})(folder)


def empty_tensor(header):
  header["layers.0.nothing"] = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}


def config(**changes):
  def damage(folder):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["text_config"].update(changes)
    path.write_text(json.dumps(values))

  return damage


def instead_of_file(make):
  def damage(folder):
    (folder / WEIGHTS).unlink()
    make(folder / WEIGHTS)

  return damage


HEADER = "its header is not what the format says"
ATTACKS = {
  "no bytes": (lambda f: put(f, b""), "its header is cut off"),
  "length 2^63": (lambda f: put(f, (2**63).to_bytes(8, "little") + b"{}"), "its header is cut off"),
  "no JSON": (lambda f: put_header(f, b"\xff" * 9), HEADER),
  "deep JSON": (lambda f: put_header(f, b"[" * 10**5), HEADER),
  "a list": (lambda f: put_header(f, []), HEADER),
  "key twice": (duplicate_in_header, HEADER),
  "negative shape": (edit_header(lambda h: h["norm.weight"].update(shape=[-64, -1])), HEADER),
  "shape of text": (edit_header(lambda h: h["norm.weight"].update(shape=["64"])), HEADER),
  "dtype of lists": (edit_header(lambda h: h["norm.weight"].update(dtype=["BF16"])), HEADER),
  "unknown dtype": (edit_header(lambda h: h["norm.weight"].update(dtype="F8_E5M2")),
                    "tensor norm.weight has dtype F8_E5M2, known are"),
  "offsets": (edit_header(lambda h: h["norm.weight"].update(data_offsets=[0, 128])),
              "does not lie where its shape says"),
  "zero length": (edit_header(empty_tensor), "unused tensor layers.0.nothing"),
  "unknown prefix": (edit_header(lambda h: h.update({"lm_head.weight": h.pop("head.weight")})),
                     "missing tensor head.weight; unused tensor lm_head.weight"),
  "a pipe": (instead_of_file(os.mkfifo), "it is no file"),
  "a folder": (instead_of_file(os.mkdir), "it is no file"),
  "broken link": (instead_of_file(lambda p: p.symlink_to("nowhere")), "it is no file"),
  "index twice": (duplicate_in_index, "is no index: a key is there twice"),
  "index outside": (outside, f"lacks ../other.safetensors, which {INDEX} names"),
  "index of nothing": (index(**{"norm.weight": None}), f"lacks None, which {INDEX} names"),
  "too many experts": (config(n_routed_experts=10**9), "n_routed_experts is 1000000000, of 297"),
  "endless primes": (config(engram_vocab_size=10**15), "primes from 1000000000000000 on add up to"),
  "no groups": (config(o_groups=0), "o_groups must be at least 1"),
  "width of text": (config(hidden_size="64"), "config.json: "),
  "half a layer": (config(compress_ratios=[0, 1.5, 1, 1, 1]), "config.json"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
  made = tmp_path / "release"
  made.mkdir()
  for name in ("config.json", WEIGHTS):
    shutil.copy(CASE / name, made)
  return made


@pytest.mark.parametrize("name", ATTACKS)
def test_a_folder_that_is_no_checkpoint_is_refused_in_one_line(name, folder):
  attack, sentence = ATTACKS[name]
  attack(folder)
  with pytest.raises(CheckpointError) as error:
    open_released(folder)
  assert sentence in str(error.value) and "\n" not in str(error.value)


def test_files_may_be_links_as_in_the_cache_of_a_model_hub(folder, tmp_path):
  blob = tmp_path / "blobs"
  shutil.move(folder / WEIGHTS, blob)
  (folder / WEIGHTS).symlink_to("../blobs")
  index()(folder)
  assert len(open_released(folder).tensors) == 297


def test_a_file_without_tensors_is_no_harm(folder):
  (folder / "empty.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
  assert len(open_released(folder).tensors) == 297


@pytest.mark.parametrize(
  ("name", "code"), [("layers.0.attn.wkv.weight", 0x7F), ("norm.weight", 0xFF)]
)
def test_weights_that_are_no_numbers_do_not_come_in(folder, name, code):
  header, data = parts(folder)
  begin, end = header[name]["data_offsets"]
  put(folder, (folder / WEIGHTS).read_bytes()[: -len(data)] + data[:begin]
      + bytes([code]) * (end - begin) + data[end:])  # fmt: skip
  released = open_released(folder)
  with pytest.raises(ValueError, match=f"^{name} in .* holds values that are not finite.$"):
    load_released(released.tensors, released.cfg)


json_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=5,
)
KEYS = sorted(json.loads((CASE / "config.json").read_text())["text_config"])


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(KEYS), value=json_values)
def test_any_value_in_a_configuration_is_taken_or_refused(tmp_path_factory, key, value):
  folder = tmp_path_factory.mktemp("release")
  (folder / WEIGHTS).symlink_to(CASE / WEIGHTS)
  values = json.loads((CASE / "config.json").read_text())
  values["text_config"][key] = value
  (folder / "config.json").write_text(json.dumps(values))
  with contextlib.suppress(CheckpointError):
    taken = open_released(folder)
    assert taken.cfg.problems() == [] and taken.tensors


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_in_a_header_are_taken_or_refused_as_damaged(tmp_path_factory, data):
  path = tmp_path_factory.mktemp("file") / WEIGHTS
  text = bytearray(b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}')
  for _ in range(data.draw(st.integers(1, 4))):
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
  length = data.draw(st.sampled_from([len(text)] * 9 + [0, 5, 2**32]))
  path.write_bytes(length.to_bytes(8, "little") + text + np.zeros(6, np.float32).tobytes())
  with contextlib.suppress(ValueError):
    read = {name: stored.whole() for name, stored in read_headers(path).items()}
    assert sum(values.nbytes for values in read.values()) <= 24
