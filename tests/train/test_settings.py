"""Configuration: what is right becomes a frozen tree, what is wrong is named, all of it at once."""

import dataclasses
import json
import pathlib
import textwrap

import numpy as np
import pytest

from configs import base
from configs.schema import Settings
from data.prepared import COMPRESSED_ID, METADATA, Prepared, Split, file_sha256, save_prepared
from deepseek_jax.config import flash
from train import checks, settings
from train.errors import UsageError
from train.keys import KEYS

NANO = "--config=configs/nano.py"


def prepared_folder(folder, *, vocab=256, slots=64):
  """Metadata as `prepare` leaves it; the checks read no rows."""
  np.save(folder / COMPRESSED_ID, np.arange(vocab, dtype=np.int32))
  split = Split(
    documents=1, rows=8, tokens=512, targets=511, bytes=2000, padding_fraction=0.0, shards=()
  )
  given = dict(folder=folder, slots=slots, vocab=vocab, compressed_classes=vocab, pad=2)
  given |= dict(train=split, validation=split, request={}, dropped={})
  given["compressed_id_sha256"] = file_sha256(folder / COMPRESSED_ID)
  blank = {"int": 0, "str": ""}
  fields = {
    f.name: blank.get(getattr(f.type, "__name__", "")) for f in dataclasses.fields(Prepared)
  }
  save_prepared(Prepared(**fields | given))
  return f"--config.data.paths={folder}"


@pytest.fixture
def data(tmp_path):
  return prepared_folder(tmp_path)


def parse(*argv, devices=1):
  return settings.parse([*argv, "--workdir=runs/x"], devices=devices).settings


def problems(*argv, devices=1):
  with pytest.raises(UsageError) as caught:
    parse(*argv, devices=devices)
  return list(caught.value.problems)


def test_every_key_has_a_unit_and_there_are_few():
  assert set(base.UNITS) == set(KEYS)
  assert len(KEYS) < 150


def test_the_defaults_are_the_release():
  assert Settings.from_dict(base.get_config().to_dict()).model == flash()


@pytest.mark.parametrize("name", ["nano", "small", "flash", "tiny", "tiny.py:smoke"])
def test_every_configuration_is_sound_but_for_its_data_and_devices(name):
  file = name if ".py" in name else f"{name}.py"
  found = settings.load(f"configs/{file}", {})
  assert found.model.problems() == []
  mesh = dataclasses.asdict(found.mesh)
  said = checks.problems(found, devices=int(np.prod(list(mesh.values()))))
  assert all(sentence.startswith("data.paths") for sentence in said)


@pytest.mark.parametrize("name", ["nano", "tiny"])
def test_small_configurations_have_every_part(name):
  c = settings.load(f"configs/{name}.py", {})
  schedule = c.model.schedule()
  assert {spec.kind for spec in schedule} == {"swa", "full", "reindex", "reuse"}
  assert {spec.pool for spec in schedule} == {None, "publish", "restrict"}
  assert c.model.ratios == (1, 2)
  assert len(c.model.engram.layers) == 2
  indexer = c.model.indexer
  assert indexer.top_k < indexer.pool_blocks * indexer.pool_block_size < c.data.slots


def test_overrides_take_the_type_of_their_key(data):
  found = parse(
    NANO,
    data,
    "--config.optim.peak_lr=1",
    "--config.model.scan_layers=false",
    "--config.model.remat=none",
    "--config.model.rope.theta",
    "500",
    "--config.mesh.fsdp=2",
    devices=2,
  )
  assert type(found.optim.peak_lr) is float
  assert found.model.scan_layers is False
  assert found.model.remat == "none"
  assert found.model.rope.theta == 500.0
  assert found.mesh.fsdp == 2


def test_none_and_lists_are_written_as_in_python(data):
  given = {
    "model.decoder_start": "none",
    "model.indexer.pool_source": "None",
    "model.kv_sources": "(1, 3)",
    "data.paths": "a,b",
    "data.weights": "1",
  }
  found = settings.load("configs/nano.py", given)
  assert found.model.decoder_start is None
  assert found.model.indexer.pool_source is None
  assert found.model.kv_sources == (1, 3)
  assert found.data.paths == ("a", "b")
  assert found.data.weights == (1.0,)


def test_the_resolved_file_reads_back_as_the_same_settings():
  for name in ("nano", "tiny", "flash"):
    found = settings.load(f"configs/{name}.py", {"model.norm_eps": "1e-20"})
    assert settings.settings_from_json(settings.resolved_json(found)) == found


def test_differences_name_the_key_and_both_values():
  one = settings.load("configs/nano.py", {})
  other = settings.load("configs/nano.py", {"optim.peak_lr": "0.5"})
  assert settings.differences(one, one) == []
  assert settings.differences(one, other) == ["optim.peak_lr was 0.003 and is now 0.5."]


def test_all_kinds_of_wrong_arguments_are_named_at_once():
  with pytest.raises(UsageError) as caught:
    settings.parse(
      [
        "--config=configs/nano.py",
        "--wrokdir=x",
        "--config.total_steps=abc",
        "--config.optim.peek_lr=1",
        "--config.mesh=8",
        "--config.model.kv_sources=2.5",
        "--config.objective.indexer=desne",
        "--config.seed",
      ],
      devices=1,
    )
  assert sorted(caught.value.problems) == sorted(
    [
      "--wrokdir is not an argument; the nearest is --workdir.",
      "--config.seed needs a value.",
      "--workdir is missing.",
      "total_steps must be an integer, got 'abc'.",
      "optim.peek_lr is not a configuration key; the nearest is optim.peak_lr.",
      "mesh is a section; name one of its keys: replica, fsdp, expert, context, tensor.",
      "model.kv_sources must be a list of integers, got (2.5,).",
      "objective.indexer must be one of off, dense, sparse, got 'desne'.",
    ]
  )


@pytest.mark.parametrize(
  ("override", "sentence"),
  [
    ("mesh.fsdp=2", "multiply to 2, but the number of devices is 1."),
    ("mesh.expert=3", "mesh.expert is 3, which does not divide model.moe.experts (4)."),
    ("mesh.context=16", "model.attention.window - 1 (7). --config.mesh.context=8 would fit."),
    ("model.attention.heads=3", "model.attention.heads (3) must be a multiple of o_groups (2)."),
    ("model.kv_sources=(3,)", "Layer 1 reads compressed entries, but no KV source stands before"),
    ("data.slots=63", "data.slots (63) must be a multiple of every compression ratio"),
    ("data.batch_rows=3", "must be a multiple of mesh.replica * mesh.fsdp * mesh.expert * accu"),
    ("optim.warmup_steps=9", "optim.warmup_steps (9) must be below total_steps (8)."),
    ("optim.final_lr=1", "optim.final_lr (1.0) must not exceed optim.peak_lr (0.003)."),
    ("optim.beta2=1", "optim.beta2 must be at least 0 and less than 1, got 1.0."),
    ("model.engram.prime_start=7", "but the hash primes from 7 on add up to"),
    ("data.paths=nowhere", "data.paths names 'nowhere', where no finished preparation lies"),
    ("data.paths=()", "data.paths is empty"),
    ("model.attention.o_groups=0", "model.attention.o_groups must be at least 1, got 0."),
    ("checkpoint.every_steps=0", "checkpoint.every_steps must be at least 1, got 0."),
    ("optim.clip_norm=0", "optim.clip_norm must be positive, got 0.0."),
  ],
)
def test_impossible_combinations_are_refused_in_a_sentence(data, override, sentence):
  argv = [NANO, data, "--config.accumulation=2", f"--config.{override}"]
  assert any(sentence in said for said in problems(*argv)), problems(*argv)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
  said = problems(NANO, prepared_folder(tmp_path, vocab=300))
  assert f"model.vocab is 256, but the tokenizer of {tmp_path} has 300 token ids." in said
  assert any("model.engram.compressed_vocab is 256" in sentence for sentence in said)


def test_damaged_metadata_is_named(tmp_path):
  argument = prepared_folder(tmp_path)
  (tmp_path / METADATA).write_text("{")
  assert any("metadata.json is damaged" in sentence for sentence in problems(NANO, argument))


def test_no_value_of_any_key_ends_in_a_traceback(data):
  said = []
  for key in KEYS:
    for text in ("0", "-1", "7", "none", "()", "(99,)", "x"):
      try:
        parse(NANO, data, f"--config.{key}={text}")
      except UsageError as error:
        said += error.problems
  assert len(said) > len(KEYS)
  assert [sentence for sentence in said if not sentence.endswith(".")] == []


def write_config(folder: pathlib.Path, body: str) -> str:
  path = folder / "own.py"
  path.write_text(textwrap.dedent(body))
  return str(path)


def file_problem(path):
  with pytest.raises(UsageError) as caught:
    settings.load(path, {})
  (sentence,) = caught.value.problems
  return sentence


def test_a_file_anywhere_may_build_on_base(tmp_path):
  path = write_config(
    tmp_path,
    """
    from configs import base
    def get_config(steps="7"):
      c = base.get_config()
      c.total_steps = int(steps)
      return c
    """,
  )
  assert settings.load(path, {}).total_steps == 7
  assert settings.load(f"{path}:9", {}).total_steps == 9


def test_configs_are_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert settings.load("configs/nano.py", {}).model.vocab == 256


@pytest.mark.parametrize(
  ("body", "sentence"),
  [
    ("import nothing_of_this_name", "line 1: ModuleNotFoundError: No module named"),
    ("x = (", "line 1: SyntaxError: '(' was never closed."),
    ("x = 1", "has no function get_config()."),
    ("get_config = lambda: 3", "get_config() must return a ConfigDict, got 3."),
    (
      "from configs import base\nc = base.get_config()\nc.model.atention = 3",
      "line 3: atention is not a configuration key; the nearest is model.attention.",
    ),
  ],
)
def test_a_file_that_fails_is_named_with_its_line(tmp_path, body, sentence):
  assert sentence in file_problem(write_config(tmp_path, body))


def test_missing_files_and_unknown_variants_are_named():
  assert "configs/nono.py, which does not exist; configs/ has" in file_problem("configs/nono.py")
  assert "must be a Python file" in file_problem("configs/nano")
  assert "configs/nano.py has no variants, got 'big'." in file_problem("configs/nano.py:big")
  assert "variant 'big' is not one of full, smoke." in file_problem("configs/tiny.py:big")


def test_types_in_a_file_are_checked_like_those_of_the_command_line(tmp_path):
  path = write_config(
    tmp_path,
    """
    from configs import base
    def get_config():
      c = base.get_config()
      c.total_steps = "many"
      c.mesh.fsdp = 1.5
      return c
    """,
  )
  with pytest.raises(UsageError) as caught:
    settings.load(path, {})
  assert set(caught.value.problems) == {
    "total_steps must be an integer, got 'many'.",
    "mesh.fsdp must be an integer, got 1.5.",
  }


def test_the_resolved_file_is_plain_nested_json():
  text = settings.resolved_json(settings.load("configs/nano.py", {}))
  assert json.loads(text)["model"]["attention"]["window"] == 8
