"""Two processes convert what one does, each its own shards and files."""

import numpy as np
import pytest

from deepseek_jax.checkpoint import verify_step
from deepseek_jax.checkpoint.released_folder import open_released
from deepseek_jax.checkpoint.stored_arrays import open_items
from tests.train.several import run
from train.errors import Exit

pytestmark = pytest.mark.slow


def command(source, target, *words):
  return ("-m", "train", "convert", "--checkpoint", source, "--output", target, *words)


def test_two_processes_read_and_write_what_one_does(converted, tmp_path):
  made, back = tmp_path / "made", tmp_path / "back"
  into = command(converted / "case", made, "--format", "checkpoint", "--config.mesh.expert=2",
                 "--config.mesh.fsdp=2")  # fmt: skip
  codes, outputs = run(tmp_path / "in", 2, into)
  assert codes == [Exit.DONE, Exit.DONE], outputs
  assert len(outputs[0]) == 2 and outputs[1] == []
  assert verify_step(made / "checkpoints" / "0") == []
  ours, theirs = (open_items(folder / "checkpoints" / "0") for folder in (made, converted / "run"))
  assert {item: set(leaves) for item, leaves in ours.items()} == {
    item: set(leaves) for item, leaves in theirs.items()
  }
  for item, leaves in ours.items():
    for name, array in leaves.items():
      wanted = theirs[item][name].read().result()
      np.testing.assert_array_equal(array.read().result(), wanted, name)
  out_of = command(made, back, "--format", "released", "--dtype", "released")
  codes, outputs = run(tmp_path / "out", 2, out_of)
  assert codes == [Exit.DONE, Exit.DONE], outputs
  assert "39 of 39 kinds of tensors are stored exactly." in outputs[0]
  assert verify_step(back) == []
  assert open_released(back).cfg == open_released(converted / "released").cfg


def test_a_problem_of_the_source_ends_all_processes_with_the_same_sentence(converted, tmp_path):
  into = command(converted / "run", tmp_path / "made", "--format", "checkpoint")
  codes, outputs = run(tmp_path / "in", 2, into)
  assert codes == [Exit.USAGE, Exit.USAGE]
  assert outputs == [[f"--checkpoint {converted / 'run'} is no released checkpoint."], []]
