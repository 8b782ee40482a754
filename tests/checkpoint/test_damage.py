"""Damaged and unfinished steps are named, set aside, and never used."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepseek_jax.checkpoint import CheckpointError, Checkpoints, restore_step, verify_step

ON_ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
SHAPE = (64, 64)
ABSTRACT = {"params": {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=ON_ONE)}}


def save(folder, *steps):
  checkpoints = Checkpoints(folder, keep_last=2)
  for step in steps:
    w = jax.random.normal(jax.random.key(step), SHAPE)
    checkpoints.save(step, {"params": {"w": w}}, data={"next": step}, meta={})
  checkpoints.close()


def restore(folder, report=lambda sentence: None):
  checkpoints = Checkpoints(folder, keep_last=2, report=report)
  try:
    return checkpoints.restore(ABSTRACT)
  finally:
    checkpoints.close()


def largest_file(step: pathlib.Path) -> pathlib.Path:
  return max((step / "params").rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path: pathlib.Path) -> None:
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 0x10
  path.write_bytes(content)


def truncate(path: pathlib.Path) -> None:
  path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
  "flipped bit of an array": lambda step: flip(largest_file(step)),
  "flipped bit of Orbax's metadata": lambda step: flip(step / "params" / "_METADATA"),
  "flipped bit of the data state": lambda step: flip(step / "data" / "metadata"),
  "truncated array": lambda step: truncate(largest_file(step)),
  "missing array": lambda step: largest_file(step).unlink(),
  "missing item": lambda step: shutil.rmtree(step / "params"),
  "missing manifest": lambda step: (step / "manifest.json").unlink(),
  "truncated manifest": lambda step: truncate(step / "manifest.json"),
  "empty manifest": lambda step: (step / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_step_is_set_aside_and_the_one_before_is_used(tmp_path, name):
  save(tmp_path, 1, 2)
  DAMAGE[name](tmp_path / "2")
  sentences = []
  found = restore(tmp_path, sentences.append)
  assert found.step == 1 and found.data == {"next": 1}
  np.testing.assert_array_equal(
    found.items["params"]["w"], jax.random.normal(jax.random.key(1), SHAPE)
  )
  assert len(sentences) == 1 and sentences[0].startswith("Checkpoint 2 is damaged (")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.damaged-1"]


def test_an_intact_step_has_no_problems_and_a_damaged_one_names_its_file(tmp_path):
  save(tmp_path, 1)
  assert verify_step(tmp_path / "1") == []
  path = largest_file(tmp_path / "1")
  flip(path)
  name = path.relative_to(tmp_path / "1").as_posix()
  assert verify_step(tmp_path / "1") == [f"{name} differs from its SHA-256"]


def test_all_damaged_is_an_error_and_stays_one_at_the_next_start(tmp_path):
  save(tmp_path, 1, 2)
  for step in (1, 2):
    flip(largest_file(tmp_path / f"{step}"))
  for _ in range(2):
    with pytest.raises(CheckpointError, match=r"No usable.*1\.damaged-1, 2\.damaged-1"):
      restore(tmp_path)


def test_a_step_whose_save_was_cut_short_is_unfinished_and_the_run_may_start_afresh(tmp_path):
  save(tmp_path, 1)
  (tmp_path / "1" / "manifest.json").unlink()
  (tmp_path / "1.saving").touch()
  sentences = []
  assert restore(tmp_path, sentences.append) is None
  assert sentences == [
    "Checkpoint 1 is unfinished (manifest.json is missing); it was set aside as 1.unfinished-1."
  ]


def test_steps_set_aside_are_numbered_and_go_when_enough_newer_steps_are_complete(tmp_path):
  save(tmp_path, 1, 2)
  for _ in range(2):
    flip(largest_file(tmp_path / "2"))
    restore(tmp_path)
    save(tmp_path, 2)
  assert {p.name for p in tmp_path.iterdir()} == {"1", "2", "2.damaged-1", "2.damaged-2"}
  save(tmp_path, 3, 4)
  assert {p.name for p in tmp_path.iterdir()} == {"3", "4"}


def test_leftovers_of_orbax_and_of_pruning_are_removed_at_the_next_start(tmp_path):
  save(tmp_path, 1)
  for name in ("2.orbax-checkpoint-tmp", "0.deleting"):
    (tmp_path / name / "params").mkdir(parents=True)
  (tmp_path / "2.saving").touch()
  assert restore(tmp_path).step == 1
  assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_reading_one_step_changes_nothing_in_the_folder(tmp_path):
  save(tmp_path, 1, 2)
  flip(largest_file(tmp_path / "2"))
  (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
  before = sorted(tmp_path.rglob("*"))
  assert restore_step(tmp_path / "1", ABSTRACT).step == 1
  with pytest.raises(CheckpointError, match="differs from its SHA-256"):
    restore_step(tmp_path / "2", ABSTRACT)
  with pytest.raises(CheckpointError, match="9 is not a folder"):
    restore_step(tmp_path / "9", ABSTRACT)
  assert sorted(tmp_path.rglob("*")) == before
