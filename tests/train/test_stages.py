"""Stages: what holds in each, where it begins, and what nobody can mean."""

import dataclasses
import itertools
import shutil

import pytest

from configs.schema import Settings, Stage
from data.prepared import save_prepared
from deepseek_jax.optim.schedule import Span
from train import checks, settings, stages
from train.errors import UsageError
from train.optimizer_table import optimizer_table
from train.programs import parameter_shapes
from train.stage_table import stage_table

# Steps of 256 tokens, then of 512, then of two rows of 128.
GROWN = Stage(name="grown", tokens=600, changes={"data.batch_rows": 8, "optim.frozen": ("embed",)})
LONG = Stage(name="long", tokens=2000, changes={"data.batch_rows": 2, "data.slots": 128})


def nano(*given: Stage, **overrides: str) -> Settings:
  """The smallest configuration with some stages."""
  found = settings.load("configs/nano.py", {k.replace("__", "."): v for k, v in overrides.items()})
  return dataclasses.replace(found, stages=given)


def problems(*given: Stage, devices: int = 1) -> list[str]:
  return checks.problems(nano(*given), devices=devices, reads_data=False)


def changed(name="later", tokens=600, **changes) -> Stage:
  return Stage(
    name=name, tokens=tokens, changes={k.replace("__", "."): v for k, v in changes.items()}
  )


def test_each_stage_is_the_one_before_it_with_its_own_changes():
  start, grown, long = stages.resolve(nano(GROWN, LONG))
  assert [stage.name for stage in (start, grown, long)] == ["start", "grown", "long"]
  assert start.settings == dataclasses.replace(nano(), stages=())
  assert grown.settings.data.batch_rows == 8 and grown.settings.data.slots == 64
  assert (long.settings.data.batch_rows, long.settings.data.slots) == (2, 128)
  assert long.settings.optim.frozen == ("embed",)


def test_a_stage_begins_with_the_first_step_after_its_tokens():
  plan = stages.resolve(nano(GROWN, LONG))
  assert [(s.tokens, s.first_step, s.last_step) for s in plan] == [
    (0, 1, 3),  # 600 tokens lie in the third step of 256
    (768, 4, 6),
    (2304, 7, 8),
  ]
  assert stages.spans(nano(GROWN, LONG)) == (Span(3, 256), Span(3, 512), Span(2, 256))
  assert [stages.stage_of(plan, step).name for step in (1, 3, 4, 8)] == [
    "start", "start", "grown", "long",
  ]  # fmt: skip


def test_tokens_at_the_end_of_a_step_begin_the_next_one():
  start, later = stages.resolve(nano(changed(tokens=512, accumulation=2)))
  assert (start.last_step, later.first_step, later.tokens) == (2, 3, 512)


def test_the_release_has_its_long_context_from_34_trillion_tokens_on():
  flash = settings.load("configs/flash.py", {})
  start, long = stages.resolve(flash)
  assert start.span.tokens == long.span.tokens == 100_663_296
  assert long.tokens - 34e12 < long.span.tokens
  assert long.settings.data.slots == 2**20
  said = checks.problems(flash, devices=512, reads_data=False)
  assert said == []


def test_rows_that_earlier_stages_read_are_not_read_again(runs):
  """Two folders in shares of 3 to 1, then of 1 to 1: ids of rows go on in each."""
  shares = changed(tokens=2 * 256, data__weights=(1.0, 1.0))
  path = str(runs.data)
  given = dataclasses.replace(
    nano(shares).data, paths=(path, path + "/."), weights=(3.0, 1.0), batch_rows=4
  )
  plan = stages.resolve(dataclasses.replace(nano(shares), data=given))
  assert stages.rows_before(plan, plan[0]) == (0, 0)
  assert stages.rows_before(plan, plan[1]) == (6, 2)


@pytest.mark.parametrize(
  ("given", "sentence"),
  [
    (changed(data__batch_rows=3, accumulation=2), "Stage later: data.batch_rows (3) must be a mul"),
    (changed(mesh__context=16), "Stage later: The axes of mesh"),
    (changed(optim__frozen=("indexr",)), "'indexr', which is no role or part of parameters; the n"),
    (changed(tokens=256 * 8), "Stage later begins after step 8, at 2,048 tokens, but total_steps"),
    (changed("start"), "stages must have names of their own, not 'start'; repeated is start."),
    (changed(tokens=0), "stages must begin one after the other, at 1 token or later, got [0]."),
  ],
)
def test_a_stage_that_cannot_be_is_named_in_a_sentence(given, sentence):
  assert any(sentence in said for said in problems(given)), problems(given)


def test_problems_of_all_stages_come_at_once_and_those_of_the_run_only_once():
  bad = nano(changed("a", data__slots=63), changed("b", 900, objective__balance_weight=-1.0))
  bad = dataclasses.replace(bad, optim=dataclasses.replace(bad.optim, beta2=1.0))
  said = checks.problems(bad, devices=1, reads_data=False)
  assert [sentence.partition(":")[0] for sentence in said[1:]] == ["Stage a", "Stage b"]
  assert said[0].startswith("optim.beta2")


def test_all_stages_read_one_tokenizer(runs, prepared, tmp_path):
  other = dataclasses.replace(
    prepared, folder=shutil.copytree(prepared.folder, tmp_path / "other"), tokenizer_sha256="0" * 64
  )
  save_prepared(other)
  later = [{"name": "later", "tokens": 600, "changes": {"data.paths": (str(other.folder),)}}]
  with pytest.raises(UsageError) as caught:
    runs.command(tmp_path / "run", stages=repr(later))
  assert caught.value.problems == (
    f"data.paths of one run must have one tokenizer; {other.folder} has another than "
    f"{prepared.folder}.",
  )


def test_stages_begin_one_after_the_other_and_each_has_a_step():
  assert "one after the other" in problems(changed("a", 900), changed("b", 600))[0]
  assert problems(changed("a", 600), changed("b", 700)) == [
    "Stage a has no step: the next one begins at once."
  ]


def read(*items, **overrides):
  try:
    texts = {k.replace("__", "."): v for k, v in overrides.items()}
    return settings.load("configs/nano.py", {"stages": repr(items)} | texts).stages
  except UsageError as error:
    return list(error.problems)


def test_a_command_line_gives_stages_and_single_keys_of_them():
  item = {"name": "a", "tokens": 600, "changes": {"data.batch_rows": 8}}
  (stage,) = read(item, stages__a__data__paths="x,y", stages__a__mesh__fsdp="2")
  assert stage == Stage(
    name="a",
    tokens=600,
    changes={"data.batch_rows": 8, "data.paths": ("x", "y"), "mesh.fsdp": 2},
  )


def test_the_form_of_stages_is_checked_all_at_once():
  item = {"name": "a", "tokens": 600, "changes": {"data.bach_rows": 8, "mesh.fsdp": "x"}}
  other = {"name": "b", "tokens": 600, "changes": {"model.dim": 8}}
  said = read(item, other, {"name": "c.d"}, stages__e__mesh__fsdp="2")
  assert said[0] == (
    "stages.a.data.bach_rows: data.bach_rows is not a configuration key; the nearest is "
    "data.batch_rows."
  )
  assert said[1] == "stages.a.mesh.fsdp must be an integer, got 'x'."
  assert said[2].startswith("stages.b.model.dim cannot be set, model.dim holds for the whole run;")
  assert said[3].startswith("stages, number 3, must be a mapping of name")
  assert said[4] == "stages.e.mesh.fsdp names the stage 'e'; known are a, b."


def test_resolved_stages_read_back_and_their_changes_are_told_apart():
  found = nano(GROWN, LONG)
  assert settings.settings_from_json(settings.resolved_json(found)) == found
  other = nano(dataclasses.replace(GROWN, changes={"data.batch_rows": 16}), LONG)
  assert settings.differences(found, other) == [
    "stages.grown.data.batch_rows was 8 and is now 16.",
    "stages.grown.optim.frozen was ('embed',) and is now not set.",
  ]
  assert settings.differences(found, other, ignoring=("data", "optim.frozen")) == []


def test_the_table_has_a_line_for_each_stage_with_what_changes():
  off = changed("late", 1024, objective__indexer="off", model__indexer__pool_source=None)
  heading, start, grown, late = stage_table(stages.resolve(nano(GROWN, off))).splitlines()
  columns = lambda line: [word.strip() for word in line.split("  ") if word]
  assert len(columns(heading)) == len(columns(start)) == 12
  assert columns(start)[:5] == ["start", "0", "1 - 3", "256", "64"]
  assert columns(grown)[3] == "512" and columns(grown)[-1] == "embed"
  assert columns(late)[6:9] == ["off", "off", "off"]
  words = columns(start)
  assert words[5] == "0.0015 - 0.003" and words[8:10] == [
    "layer 3",
    "float32 / FP8 / float32 / float32",
  ]


def test_the_optimizers_table_shows_what_is_frozen():
  found = nano(optim__frozen="attn/indexer/wk,embed")
  table = optimizer_table(parameter_shapes(found), found).splitlines()
  still = [line.split()[0] for line in table if line.split()[2] == "frozen"]
  assert still == ["attn/indexer/wk", "embed"]


def test_every_switch_that_a_stage_may_set_leaves_the_parameters_as_they_are():
  keys = [key for key in stages.KEYS if key.startswith("model.")]
  changeable = [k for k in keys if k in stages.CHANGEABLE]
  assert len(changeable) == 5
  for on, pool in itertools.product((True, False), (None, 3)):
    given = {k: pool if k.endswith("source") else on for k in changeable}
    first, other = stages.layered(nano(Stage(name="a", tokens=1, changes=given)))
    assert first[1].model.tree() == other[1].model.tree()
