"""Fine-tuning from a checkpoint: what it starts from, which steps it takes, what it measures."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from data.prepare.run import PrepareRequest, prepare
from data.prepared import TOKENIZER, load_prepared
from deepseek_jax.checkpoint import restore_step
from deepseek_jax.optim import low_rank
from deepseek_jax.sharding import make_mesh
from tests.bench import paired_kl
from tests.train.conftest import ROOT, VOCAB, Runs, prepare_with_marks
from tests.train.several import MODEL
from train import checks, convert, replay_report, settings
from train.batches import open_held_out, open_training, row_group
from train.errors import Exit, UsageError
from train.loop import state_items
from train.origin import UNSAID, Origin, first_state
from train.pretrain import pretrain
from train.programs import build_programs, loss_sums
from train.settings import SFT
from train.stored_model import open_model
from train.stored_step import find_step

SLOTS, WINDOW = 64, 8
STEPS = 4
REPLAY = {
  "data__replay__share": 0.5,
  "data__replay__decoder_slots": 80,
  "data__replay__hit_multiple": 4,
  "data__replay__max_hits": 2,
  "data__replay__hit_share": 1.0,
  "optim__bias_speed": 0.0,
  "total_steps": STEPS,
}
LOW_RANK = {"optim__low_rank__rank": 2, "optim__low_rank__alpha": 4.0, "optim__peak_lr": 0.03}


@pytest.fixture(scope="module")
def folders(prepared, tmp_path_factory):
  """Text, chats with the tokenizer of the text, and the chats with another one."""
  root = tmp_path_factory.mktemp("chats")
  text = prepare_with_marks(prepared, root / "text")
  words = ["expert", "router", "stream", "entry", "window", "query", "layer", "token", "slot"]
  pick = lambda n, k: " ".join(words[(n * (i + 2) + i * i) % len(words)] for i in range(k))
  lines = []
  for number in range(80):
    messages = []
    for turn in range(2):
      messages.append({"role": "user", "content": f"{number} {pick(number + turn, 2)}"})
      messages.append({"role": "assistant", "content": pick(number * 5 + turn, 3)})
    lines.append(json.dumps({"messages": messages}))
  (root / "chats.jsonl").write_text("\n".join(lines))
  chats = {}
  for name, tokenizer in (("chats", text.folder / TOKENIZER), ("other", f"train:{VOCAB - 10}")):
    asked = PrepareRequest(
      format="chat",
      source=f"jsonl:{root / 'chats.jsonl'}",
      tokenizer=str(tokenizer),
      slots=SLOTS,
      window=WINDOW,
      validation_share=0.25,
    )
    chats[name] = prepare(asked, root / name).folder
  return text.folder, chats["chats"], chats["other"]


@pytest.fixture(scope="module")
def pretrained(folders, one_device, tmp_path_factory):
  """Folder of a run of three steps on text, whose router biases have moved."""
  workdir = tmp_path_factory.mktemp("pretrained") / "run"
  command = Runs(folders[0]).command(workdir, total_steps=3, validation__every_steps=0)
  assert pretrain(command, one_device) is Exit.DONE
  return workdir


@pytest.fixture(scope="module")
def few_layers(folders, one_device, tmp_path_factory):
  """The same of a model that is traced quickly, for runs that start often."""
  workdir = tmp_path_factory.mktemp("few_layers") / "run"
  steps = {"total_steps": 3, "validation__every_steps": 0}
  assert pretrain(Runs(folders[0]).command(workdir, **MODEL, **steps), one_device) is Exit.DONE
  return workdir


@pytest.fixture(scope="module")
def tuning(folders):
  return Runs(folders[1], SFT)


@pytest.fixture(scope="module")
def finished(tuning, pretrained, one_device, tmp_path_factory):
  """A run with both kinds of steps, from a checkpoint that is gone by now."""
  workdir = tmp_path_factory.mktemp("tuned") / "run"
  gone = shutil.copytree(pretrained, workdir.with_name("gone"))
  command = tuning.command(workdir, **REPLAY)._replace(init=str(gone))
  assert pretrain(command, one_device) is Exit.DONE
  shutil.rmtree(gone)
  return workdir, command


@pytest.fixture(scope="module")
def changed(tuning, pretrained, one_device, tmp_path_factory):
  """A run of the same steps that changes matrices by factors."""
  workdir = tmp_path_factory.mktemp("changed") / "run"
  command = tuning.command(workdir, **REPLAY, **LOW_RANK)._replace(init=str(pretrained))
  assert pretrain(command, one_device) is Exit.DONE
  return workdir, command


def stored(workdir, step, programs):
  wanted = state_items(programs.abstract_state)
  return restore_step(workdir / "checkpoints" / str(step), wanted).items


def plain_items(programs):
  abstract = programs.abstract_state
  return {"params": low_rank.without_factors(abstract.params), "router": abstract.balance}


@pytest.mark.parametrize(
  ("variant", "origin", "devices"),
  [("sft.py", "flash.py", 512), ("sft.py:tiny", "tiny.py", 1)],
)
def test_its_configurations_are_sound_and_fit_the_models_that_they_start_from(
  variant, origin, devices
):
  tuned, before = (settings.load(f"{ROOT}/configs/{name}", {}) for name in (variant, origin))
  found = checks.problems(tuned, devices=devices, reads_data=False, measures_replay=True)
  assert found == []
  assert tuned.model.tree() == before.model.tree()
  assert settings.differences(before, tuned, ignoring=UNSAID) == []
  numerics = tuned.model.numerics
  assert numerics.main_fp4 and numerics.window_fp8 and numerics.indexer_fp4
  assert tuned.model.indexer.pool_source is not None and tuned.optim.bias_speed == 0


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_checkpoint(finished, pretrained, one_device, tuning):
  workdir, command = finished
  given = command.settings
  mesh = make_mesh(given.mesh, one_device)
  with jax.set_mesh(mesh):
    programs = build_programs(given, mesh)
    start = stored(pretrained, 3, programs)
    batch = next(open_training(given, row_group(given, mesh)))
    nats, targets = programs.evaluate(start["params"], start["router"], batch.layout)
    end = stored(workdir, STEPS, programs)
  _, first, *_ = tuning.lines(workdir)
  assert first["nll"] == pytest.approx(float(nats / targets), rel=1e-5)
  assert first["loss_tokens"] == targets
  biases = [jax.tree.leaves(items["router"]) for items in (start, end)]
  assert any(np.any(x) for x in biases[0]), "or nothing could have moved"
  assert all(np.array_equal(a, b) for a, b in zip(*biases, strict=True)), "they are frozen"


@pytest.mark.slow
def test_a_line_before_step_1_has_the_reports_alone(finished, tuning):
  before, *steps = tuning.lines(finished[0])
  assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
  reports = {name for name in steps[-1] if name.startswith("validation_")}
  assert set(before) == {"step", "tokens"} | reports
  assert before["step"] == before["tokens"] == 0 and before[replay_report.KL] > 0


@pytest.mark.slow
def test_exact_and_replayed_steps_take_turns(finished, tuning):
  lines = tuning.lines(finished[0])[1:]
  assert [line["replay_copies"] > 0 for line in lines] == [False, True, False, True]


@pytest.mark.slow
def test_reports_are_the_losses_of_both_layouts(finished, pretrained, tuning, one_device):
  """Each loss once more by itself, without any pairing of tokens."""
  workdir, command = finished
  given = command.settings
  mesh = make_mesh(given.mesh, one_device)
  before, *_, line = tuning.lines(workdir)
  with jax.set_mesh(mesh):
    programs, group = build_programs(given, mesh), row_group(given, mesh)
    for measured, at in (
      (before, stored(pretrained, 3, programs)),
      (line, stored(workdir, STEPS, programs)),
    ):
      for name, replayed in ((replay_report.EXACT, False), (replay_report.REPLAYED, True)):
        batch = next(iter(open_held_out(given, group, replayed=replayed)))
        nats, targets = programs.evaluate(at["params"], at["router"], batch.layout)
        assert measured[name] == pytest.approx(float(nats / targets), rel=1e-5)
  gap = line[replay_report.REPLAYED] - line[replay_report.EXACT]
  assert line[replay_report.GAP] == pytest.approx(gap, abs=1e-6)
  assert line[replay_report.KL] > 0 and 0 < line[replay_report.TOP1] <= 1
  assert line[replay_report.FP4] != 0 and abs(line[replay_report.FP4]) < 0.1
  assert abs(line[replay_report.POOL]) < 0.1


@pytest.mark.slow
def test_it_goes_on_without_its_origin_but_from_no_other(finished, one_device, capsys):
  _, command = finished
  for init in (None, command.init):
    assert pretrain(command._replace(init=init), one_device) is Exit.DONE
    assert "is done" in capsys.readouterr().out
  with pytest.raises(UsageError, match=f"began from {command.init}, not from /elsewhere; leave"):
    pretrain(command._replace(init="/elsewhere"), one_device)
  with pytest.raises(UsageError, match="is one of sft; pretrain needs another --workdir"):
    pretrain(command._replace(verb="pretrain"), one_device)


@pytest.mark.slow
def test_what_it_cannot_start_from_is_one_sentence(
  pretrained, folders, tuning, one_device, tmp_path
):
  command = tuning.command(tmp_path / "run", **REPLAY)
  other = Runs(folders[2], SFT).command(tmp_path / "run", **REPLAY)
  wider = tuning.command(tmp_path / "run", **REPLAY, model__moe__hidden=64)
  for given, part in (
    (other, "was trained with another tokenizer than that of"),
    (wider, "do not fit the configuration: layer_0/moe/experts/w1 is float32[4, 32"),
  ):
    with pytest.raises(UsageError) as refused:
      pretrain(given._replace(init=str(pretrained)), one_device)
    (problem,) = refused.value.problems
    assert part in problem
  assert not (tmp_path / "run" / "start.json").exists()
  untuned = command._replace(workdir=str(pretrained), init=str(pretrained), allow_change=True)
  with pytest.raises(UsageError, match="is one of pretrain; sft needs another --workdir"):
    pretrain(untuned, one_device)


def test_a_checkpoint_must_be_named_and_be_there(tuning, one_device, tmp_path):
  command = tuning.command(tmp_path / "run", **REPLAY)
  for init, part in (
    (None, "--init is missing; it names the run folder or checkpoint to start from."),
    (str(tmp_path / "no"), "no is no run folder with a complete step, and no step."),
  ):
    with pytest.raises(UsageError) as refused:
      pretrain(command._replace(init=init), one_device)
    (problem,) = refused.value.problems
    assert problem.endswith(part)
  assert not (tmp_path / "run" / "start.json").exists()


def test_only_fine_tuning_changes_by_factors(folders, tuning, one_device, tmp_path):
  untrained = Runs(folders[0]).command(tmp_path / "run", **LOW_RANK)
  with pytest.raises(UsageError, match="optim.low_rank.rank is 2, but factors change"):
    pretrain(untrained, one_device)
  wrong = {"optim__low_rank__rank": -1, "optim__low_rank__alpha": 0.0, "optim__low_rank__parts": ()}
  with pytest.raises(UsageError) as refused:
    tuning.command(tmp_path, **REPLAY, **wrong)
  assert [problem.split()[0] for problem in refused.value.problems] == [
    "optim.low_rank.rank",
    "optim.low_rank.alpha",
  ]
  with pytest.raises(UsageError, match="optim.low_rank.parts is empty; name some of attention"):
    tuning.command(tmp_path, **REPLAY, optim__low_rank__parts=())
  with pytest.raises(UsageError, match="optim.low_rank.parts must be"):
    tuning.command(tmp_path, **REPLAY, optim__low_rank__parts="router")


def test_rows_must_suit_replay_even_where_no_step_has_it(folders, tuning, tmp_path):
  """Validation measures it."""
  small = REPLAY | {"data__replay__share": 0.0, "data__replay__decoder_slots": 8}
  with pytest.raises(UsageError, match="decoder_slots is 8, but rows of"):
    tuning.command(tmp_path, **small)
  with pytest.raises(UsageError, match="Replay is for chats, but .* holds text"):
    Runs(folders[0], SFT).command(tmp_path, **REPLAY | {"data__replay__share": 0.0})
  tuning.command(tmp_path, **small, validation__every_steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LOW_RANK], ids=["weights", "factors"])
def test_killed_at_any_step_it_ends_with_the_same_lines(more, few_layers, tuning, tmp_path):
  """Also when it starts again without --init; switches begin half way."""
  switches = {"main_fp4": True, "experts_fp4": bool(more)}
  change = {"data.replay.share": 1.0} | {f"model.numerics.{n}": on for n, on in switches.items()}
  late = [{"name": "served", "tokens": 2 * 4 * SLOTS, "changes": change}]
  changes = REPLAY | {
    "data__replay__share": 0.0,
    "stages": repr(late),
    "total_steps": 6,
    "checkpoint__every_steps": 1,
    **more,
    **MODEL,
  }
  lines = []
  for name, kills in (("whole", ()), ("killed", (1, 3))):
    workdir = tmp_path / name
    words = [f"--init={few_layers / 'checkpoints' / '3'}"]
    for step in kills:
      process = tuning.start(workdir, *words, **changes)
      tuning.wait_for_step(workdir, step, process)
      process.kill()
      process.wait()
      if (workdir / "checkpoints" / "1" / "manifest.json").exists():
        words = []
    code, output = tuning.finish(workdir, *words, **changes)
    assert code == Exit.DONE, output
    lines.append(tuning.lines(workdir))
  assert lines[0] == lines[1]
  assert [line["replay_copies"] > 0 for line in lines[0][1:]] == [False] * 2 + [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "factors"])
def test_a_mesh_measures_the_same(kind, finished, changed, pretrained, tuning, tmp_path):
  """Rows, slots and tokens of both layouts lie on several devices; or experts and their factors."""
  on_one, _ = finished if kind == "weights" else changed
  mesh = {"mesh__fsdp": 2, "mesh__context" if kind == "weights" else "mesh__expert": 2}
  more = {} if kind == "weights" else LOW_RANK
  command = tuning.command(tmp_path / "run", devices=4, **REPLAY, **mesh, **more)
  assert pretrain(command._replace(init=str(pretrained)), jax.devices()[:4]) is Exit.DONE
  for step in (0, STEPS):
    one, four = (tuning.lines(folder)[step] for folder in (on_one, tmp_path / "run"))
    names = [name for name in one if name.startswith("validation_")]
    assert len(names) >= 10
    for name in names:
      assert four[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_factors_change_what_is_computed_and_no_weight(
  changed, finished, pretrained, tuning, one_device
):
  workdir, command = changed
  given = command.settings
  lines, of_weights = tuning.lines(workdir), tuning.lines(finished[0])
  assert lines[0] == of_weights[0] and lines[1]["nll"] == pytest.approx(of_weights[1]["nll"], 1e-6)
  assert lines[-1][replay_report.EXACT] < lines[0][replay_report.EXACT] - 1e-3
  assert set(n for n in lines[1] if n.startswith("update_norm_")) > {"update_norm_low_rank"}
  assert lines[1]["update_norm_low_rank"] > 0 == lines[1]["update_norm_experts"]
  with jax.set_mesh(mesh := make_mesh(given.mesh, one_device)):
    programs = build_programs(given, mesh)
    start = find_step("--init", str(pretrained))
    before = restore_step(start.path, plain_items(programs)).items["params"]
    state = stored(workdir, STEPS, programs)
    assert set(state) == {"params", "base", "low_rank", "optimizer", "router"}
    jax.tree.map(
      np.testing.assert_array_equal, low_rank.with_matrices(state["params"], state["base"]), before
    )
    batch = next(iter(open_held_out(given, row_group(given, mesh)))).layout
    # What is read without a word of factors, by the configuration of the run that was changed.
    alone = open_model("--checkpoint", str(workdir)).variables(mesh)
    plain = dataclasses.replace(
      start.settings.model, scan_layers=False, numerics=given.model.numerics
    )
    evaluate = jax.jit(loss_sums(dataclasses.replace(start.settings, model=plain)))
    nats, targets = evaluate(alone["params"], alone["balance"], batch)
  assert lines[-1][replay_report.EXACT] == pytest.approx(float(nats / targets), rel=1e-6)


@pytest.mark.slow
def test_it_starts_from_what_was_imported(pretrained, tuning, one_device, tmp_path, capsys):
  """Out as bfloat16 and in again; such a folder has no tokenizer to compare with."""
  for source, target, *words in (
    (pretrained, tmp_path / "released", "--format=released", "--dtype=bfloat16"),
    (tmp_path / "released", tmp_path / "run", "--format=checkpoint", "--config.mesh.fsdp=8"),
  ):
    done = convert.main([f"--checkpoint={source}", f"--output={target}", *words])
    assert done == Exit.DONE, capsys.readouterr()
  given = tuning.command(tmp_path / "tuned", **REPLAY).settings
  origin = Origin(SFT, None, find_step("--init", str(tmp_path / "run")))
  with jax.set_mesh(mesh := make_mesh(given.mesh, one_device)):
    programs = build_programs(given, mesh)
    state = first_state(origin, programs, given, "any")
    before = stored(pretrained, 3, programs)
  assert "does not say with which tokenizer it was trained" in capsys.readouterr().out
  assert int(state.step) == 0
  for new, old in zip(
    jax.tree.leaves(state.params), jax.tree.leaves(before["params"]), strict=True
  ):
    assert np.asarray(new) == pytest.approx(np.asarray(old), rel=2**-8)


@pytest.mark.slow
def test_runs_are_compared_response_by_response(changed, finished, tmp_path, capsys):
  """With a twin that is said to have had no replay: all its responses are the same."""
  workdir, command = changed
  twin = shutil.copytree(workdir, tmp_path / "twin")
  config = json.loads((twin / "config.json").read_text())
  config["data"]["replay"]["share"] = 0.0
  (twin / "config.json").write_text(json.dumps(config))
  words = ["--aware", str(workdir), "--json", str(tmp_path / "found.json"), "--plain"]
  assert paired_kl.main([*words, str(twin)]) == Exit.DONE
  (found,) = json.loads((tmp_path / "found.json").read_text())["pairs"]
  chats = load_prepared(command.settings.data.paths[0]).validation.documents
  assert (found["responses"], found["conversations"]) == (2 * chats, chats)
  assert found["difference"] == {"mean": 0, "low": 0, "high": 0}
  assert found["aware"]["kl"] > 0 and found["aware"]["kl"] == found["plain"]["kl"]
  capsys.readouterr()
  assert paired_kl.main([*words, str(finished[0])]) == Exit.USAGE
  said = capsys.readouterr().err
  assert "have data.replay.share [0.5, 0.5]" in said and "must be the same checkpoint" in said
