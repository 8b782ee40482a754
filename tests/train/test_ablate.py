"""Variants are trained on the same batches from two seeds, and tabled only where they compare."""

import json

import pytest

from configs import ablation
from train import ablate, checks, settings
from train.ablation_table import table
from train.errors import UsageError

from .conftest import ROOT, VOCAB

NANO = f"""
from configs import nano

def get_config(variant="v4_1"):
  c = nano.get_config()
  c.model.update(vocab={VOCAB}, remat="none")
  c.model.engram.compressed_vocab = {VOCAB}
  c.log.observed_queries = 0
  if variant == "no_engram":
    c.model.engram.update(layers=(), table_rows=())
  return c
"""


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
  """Folder with one variant trained for seven steps, and its contents."""
  folder = tmp_path_factory.mktemp("ablation")
  (folder / "nano.py").write_text(NANO)
  code = ablate.main(
    [
      f"--config={folder / 'nano.py'}",
      "--only=v4_1",
      f"--output={folder / 'v4_1.json'}",
      f"--config.data.paths={prepared.folder}",
      "--config.total_steps=7",
    ]
  )
  assert code == 0
  return folder, json.loads((folder / "v4_1.json").read_text())


@pytest.mark.slow
def test_seeds_differ_and_both_learn(trained):
  _, result = trained
  first, last = result["loss"][0], result["loss"][-1]
  assert first[0] == 1 and last[0] == 7
  assert first[1] != first[2] and result["bits_per_byte"][0] != result["bits_per_byte"][1]
  assert last[1] < first[1] and last[2] < first[2]


def result(**changes):
  """As `ablate` writes it, as far as the table reads it."""
  return {
    "variant": "v4_1",
    "seeds": [0, 1],
    "tokens": 1000,
    "data": "a",
    "activated_parameters": 21_000_000,
    "training_flops_per_token": 143e6,
    "prefill_flops_per_token": 23e6,
    "kv_bytes_per_token": 132.5,
    "bits_per_byte": [1.5, 1.75],
    "tokens_per_second": 100_000.0,
  } | changes


def test_the_table_has_what_was_run_and_says_what_was_not(tmp_path):
  (tmp_path / "a.json").write_text(json.dumps(result()))
  rows = table(tmp_path).splitlines()[2:]
  assert len(rows) == len(ablation.VARIANTS)
  assert "| 21.0 M | 143 M | 23.0 M | 132 | 1.6250 (1.5000, 1.7500) | 100,000 |" in rows[0]
  assert all("not run" in row for row in rows[1:])


def test_results_that_do_not_compare_are_refused(tmp_path):
  (tmp_path / "a.json").write_text(json.dumps(result()))
  (tmp_path / "b.json").write_text(json.dumps(result(variant="no_ced", tokens=1)))
  (tmp_path / "c.json").write_text("{}")
  with pytest.raises(UsageError) as error:
    table(tmp_path)
  assert list(error.value.problems) == [
    f"{tmp_path}/b.json was trained with other tokens than v4_1.",
    f"{tmp_path}/c.json is no result of ablate.",
  ]


def test_every_problem_of_the_arguments_is_named(tmp_path):
  with pytest.raises(UsageError) as error:
    ablate.main(["--only=v4_1", f"--output={tmp_path}/no/f.txt"])
  assert len(error.value.problems) == 3


@pytest.mark.parametrize("variant", ablation.VARIANTS)
def test_variants_differ_in_what_they_name_alone(variant):
  """Sound, and equal to V4.1 but for its schedule, tables or streams."""
  own, base = (settings.load(f"{ROOT}/configs/ablation.py:{v}", {}) for v in (variant, "v4_1"))
  assert list(checks.problems(own, devices=1, reads_data=False)) == []
  changed = {
    name
    for name in ("compress_ratios", "kv_sources", "index_sources", "decoder_start", "streams")
    if getattr(own.model, name) != getattr(base.model, name)
  }
  changed |= {"engram"} if own.model.engram != base.model.engram else set()
  assert (
    changed
    == {
      "v4_1": set(),
      "no_ced": {"kv_sources", "decoder_start"},
      "yoco": {"compress_ratios", "kv_sources", "index_sources"},
      "v4": {"compress_ratios", "kv_sources", "index_sources", "decoder_start"},
      "no_index_sharing": {"index_sources"},
      "no_engram": {"engram"},
      "no_mhc": {"streams"},
    }[variant]
  )
