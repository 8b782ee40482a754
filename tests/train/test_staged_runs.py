"""Several stages are one run: killed anywhere, it ends with the lines of one that was not."""

import os
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from data.prepare.run import PrepareRequest, prepare
from data.prepared import TOKENIZER
from deepseek_jax.checkpoint import restore_step
from deepseek_jax.optim.parts import PARTS
from deepseek_jax.sharding import make_mesh
from tests.train.several import MODEL, run
from train import stages
from train.errors import Exit
from train.loop import state_items
from train.programs import build_programs

pytestmark = pytest.mark.slow

# Four steps of 256 tokens, four of 512 in two pieces that warm indexers up, four of longer rows.
BORDERS = (4, 8)
ALL_BUT_INDEXERS = tuple(part for part in PARTS if part != "indexer")


@pytest.fixture(scope="module")
def longer(prepared, tmp_path_factory):
  """The same text in rows of 128."""
  request = PrepareRequest(
    source=prepared.request["source"],
    tokenizer=str(pathlib.Path(prepared.folder) / TOKENIZER),
    slots=128,
    validation_share=0.25,
  )
  return prepare(request, tmp_path_factory.mktemp("longer")).folder


@pytest.fixture(scope="module")
def changes(longer):
  warmup = {
    "data.batch_rows": 8,
    "accumulation": 2,
    "objective.indexer": "dense",
    "optim.bias_speed": 0.0,
    "optim.frozen": ALL_BUT_INDEXERS,
  }
  long = {
    "data.slots": 128,
    "data.batch_rows": 2,
    "data.paths": (str(longer),),
    "accumulation": 1,
    "objective.indexer": "sparse",
    "optim.frozen": ("embed", "attn/sink"),
    "model.indexer.pool_source": None,
    "model.numerics.main_fp4": True,
  }
  given = [
    {"name": "warmup", "tokens": 1000, "changes": warmup},
    {"name": "long", "tokens": 3072, "changes": long},
  ]
  return MODEL | {
    "stages": repr(given),
    "total_steps": 12,
    "checkpoint__every_steps": 3,
    "checkpoint__keep_last": 20,
    "validation__every_steps": 6,
  }


@pytest.fixture(scope="module")
def uninterrupted(runs, changes, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
  code, output = runs.finish(workdir, **changes)
  assert code == Exit.DONE, output
  return workdir, output


def stored(workdir, command, step, devices=1):
  """Parameters after a step, and the names of the optimizer's arrays."""
  plan = stages.resolve(command.settings)
  mesh = make_mesh(plan[0].settings.mesh, jax.devices()[:devices])
  given = stages.stage_of(plan, step).settings
  with jax.set_mesh(mesh):
    wanted = state_items(build_programs(given, mesh, stages.spans(command.settings)).abstract_state)
  return restore_step(workdir / "checkpoints" / str(step), wanted).items


def by_name(tree):
  """Its arrays by their names."""
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}


def test_stages_follow_one_another_in_one_folder(uninterrupted, runs):
  workdir, output = uninterrupted
  lines = runs.lines(workdir)
  assert [line["step"] for line in lines] == list(range(1, 13))
  assert np.diff([0, *(line["tokens"] for line in lines)]) == pytest.approx(
    [256] * 4 + [512] * 4 + [256] * 4, rel=0.1
  )
  assert all(line["grad_norm_attention"] == 0 < line["grad_norm_indexer"] for line in lines[4:8])
  assert all((workdir / "checkpoints" / str(step) / "manifest.json").exists() for step in BORDERS)
  assert output.count("Compiled in") == 3
  assert "Stage warmup, steps 5 to 8." in output and "Stage long, steps 9 to 12." in output


def test_what_is_frozen_stays_bit_for_bit_and_has_no_state(uninterrupted, runs, changes):
  workdir, _ = uninterrupted
  command = runs.command(workdir, **changes)
  at = {step: stored(workdir, command, step) for step in (4, 8, 12)}
  params = {step: by_name(items["params"]) for step, items in at.items()}
  same = lambda a, b: {
    name for name in params[a] if np.array_equal(params[a][name], params[b][name])
  }
  assert same(4, 8) == {name for name in params[4] if "/indexer/" not in name}
  assert same(8, 12) == {name for name in params[4] if name == "embed" or name.endswith("/sink")}
  state = {step: by_name(items["optimizer"]) for step, items in at.items()}
  of_parameters = lambda step: {n for n in state[step] if "layer_" in n or n.endswith("head")}
  assert of_parameters(8) and all("/indexer/" in name for name in of_parameters(8))
  assert of_parameters(12) == {name for name in of_parameters(4) if not name.endswith("/sink")}
  assert not any(name.endswith("/embed") for name in state[12])
  balance = [jax.tree.leaves(at[step]["router"]) for step in (4, 8)]
  assert all(np.array_equal(a, b) for a, b in zip(*balance, strict=True))


@pytest.mark.parametrize("step", [2, 6, 10])
def test_killed_inside_a_stage_it_ends_with_the_same_lines(
  runs, uninterrupted, changes, tmp_path, step
):
  workdir = tmp_path / "run"
  process = runs.start(workdir, **changes)
  runs.wait_for_step(workdir, step, process)
  os.killpg(process.pid, signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  code, output = runs.finish(workdir, **changes)
  assert code == Exit.DONE, output
  assert runs.lines(workdir) == runs.lines(uninterrupted[0])


@pytest.mark.parametrize("border", BORDERS)
def test_begun_again_at_a_border_it_ends_with_the_same_lines(
  runs, uninterrupted, changes, tmp_path, border
):
  workdir = tmp_path / "run"
  shutil.copytree(uninterrupted[0], workdir)
  for path in (workdir / "checkpoints").iterdir():
    if int(path.name) > border:
      shutil.rmtree(path)
  code, output = runs.finish(workdir, **changes)
  assert code == Exit.DONE, output
  assert f"Continuing after step {border}." in output
  assert runs.lines(workdir) == runs.lines(uninterrupted[0])


def test_a_border_that_is_a_checkpoint_anyway_is_saved_once(runs, changes, tmp_path):
  workdir = tmp_path / "run"
  given = changes | {"checkpoint__every_steps": 4}
  code, output = runs.finish(workdir, **given)
  assert code == Exit.DONE, output
  saved = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
  assert saved == [4, 8, 12]


def test_mesh_and_frozen_parameters_change_alike_in_one_process_and_in_two(runs, tmp_path):
  """One device all along; four devices in two processes, which share rows after the border."""
  found = {}
  for count, devices in ((1, 1), (2, 4)):
    cut = {"mesh.fsdp": 2, "mesh.context": 2} if devices > 1 else {}
    later = {"data.batch_rows": 8, "optim.frozen": (), **cut}
    given = {
      "stages": repr([{"name": "later", "tokens": 512, "changes": later}]),
      "optim__frozen": "attention,embed",
      "mesh__fsdp": devices,
      "total_steps": 4,
      "validation__every_steps": 0,
    }
    workdir = tmp_path / str(count) / "run"
    command = ("-m", "train", "pretrain", *runs.argv(workdir, **(MODEL | given)))
    codes, outputs = run(workdir.parent, count, command, devices)
    assert codes == [Exit.DONE] * count, outputs
    found[count] = runs.lines(workdir)
  for one, two in zip(found[1], found[2], strict=True):
    assert one["tokens"] == two["tokens"]
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
