"""`python -m train generate` on a run folder with random weights."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import linen as nn

from data.chat.markup import Mark
from data.chat.render import as_text
from data.chat.tokens import chat_tokenizer
from data.prepare.tokenizer import CHAT_TOKENS
from deepseek_jax.checkpoint import Checkpoints
from deepseek_jax.model import Model
from deepseek_jax.sampling.session import Session
from tests.train.conftest import REFERENCE, ROOT, VOCAB, prepare_with_marks
from tests.train.spoil import change_model, damage
from train import convert, generate, settings
from train.__main__ import main
from train.batches import empty_row
from train.chat_prompt import ANSWER, REASONING
from train.chat_talk import talk
from train.errors import Exit
from train.stored_model import open_model


@pytest.fixture(scope="module")
def text_data(prepared, tmp_path_factory):
  """The same text, with a tokenizer that has the marks of chats."""
  return prepare_with_marks(prepared, tmp_path_factory.mktemp("text_data"))


@pytest.fixture(scope="module")
def trained(text_data, tmp_path_factory):
  """A run folder as a run leaves it, at step 7."""
  folder = tmp_path_factory.mktemp("trained")
  arguments = [f"--config={ROOT}/configs/nano.py", f"--workdir={folder}"]
  vocab = {"model.vocab": VOCAB, "model.engram.compressed_vocab": VOCAB}
  overrides = {"data.paths": text_data.folder} | vocab
  arguments += [f"--config.{key}={value}" for key, value in overrides.items()]
  chosen = settings.parse(arguments, devices=1).settings
  (folder / "config.json").write_text(settings.resolved_json(chosen))
  init = lambda key: nn.unbox(Model(chosen.model).init(key, empty_row(chosen)))
  rng = np.random.default_rng(0)
  draw = lambda leaf: np.float32((leaf.ndim == 1) + 0.3 * rng.normal(size=leaf.shape))
  variables = jax.tree.map(draw, jax.eval_shape(init, jax.random.key(0)))
  variables = jax.device_put(variables, jax.devices()[0])
  checkpoints = Checkpoints(folder / "checkpoints")
  items = {"params": variables["params"], "router": variables["balance"]}
  checkpoints.save(7, items, {"tokenizer": text_data.tokenizer_sha256}, {})
  checkpoints.close()
  return folder


def request(folder, *words):
  argv = ["--checkpoint", str(folder), "--prompt", "router", "--max-new-tokens", "12", *words]
  return generate.parse(argv)


@pytest.fixture(scope="module")
def loaded(trained):
  return generate.load(request(trained))


def text(loaded, folder, *words):
  return "".join(generate.write(loaded, request(folder, *words)))


def test_a_seed_gives_one_text_and_another_seed_another(loaded, trained):
  first = text(loaded, trained)
  assert len(first) > 3
  assert text(loaded, trained, "--seed=0") == first != text(loaded, trained, "--seed=1")
  assert text(loaded, trained, "--temperature=0") == text(loaded, trained, "--top-p=1e-6")


@pytest.mark.slow
def test_the_command_prints_the_text(loaded, trained, capsys):
  argv = ["--checkpoint", str(trained), "--prompt", "router", "--max-new-tokens", "12", "--step=7"]
  assert main(["generate", *argv]) == Exit.DONE
  assert capsys.readouterr().out == text(loaded, trained) + "\n"
  assert main(["generate", *argv, "--cache=plain", "--exact"]) == Exit.DONE
  assert len(capsys.readouterr().out) > 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,expert=2,tensor=2", "replica=2,expert=2,context=2"])
def test_the_text_of_eight_devices_is_that_of_one(mesh, loaded, trained):
  alone, spread = text(loaded, trained), request(trained, "--mesh", mesh)
  on_mesh = generate.load(spread)
  with jax.set_mesh(on_mesh.mesh):
    assert "".join(generate.write(on_mesh, spread)) == alone


@pytest.mark.slow
def test_a_text_does_not_depend_on_those_beside_it(loaded, trained):
  texts = text(loaded, trained, "--samples=3").split("--- ")[1:]
  assert texts[0].removesuffix("\n") == "0\n" + text(loaded, trained)
  assert len({text[2:] for text in texts}) == 3


@pytest.mark.parametrize(
  ("words", "sentences"),
  [
    ([], ["--checkpoint is missing.", "--prompt is missing."]),
    (["--promt=a"], ["--promt is not an argument; the nearest is --prompt."]),
    (["--config.seed=1"], ["--config.seed is not an argument"]),
    (["--temperature=-1"], ["--temperature must be at least 0, got -1.0."]),
    (["--top-p=0"], ["--top-p must be more than 0 and at most 1, got 0.0."]),
    (["--samples=x"], ["--samples must be an integer, got 'x'."]),
    (["--max-new-tokens=0"], ["--max-new-tokens must be at least 1, got 0."]),
    (["--mesh=fsd=2"], ["--mesh is fsd=2, accepted are AXIS=DEVICES,... with the axes replica"]),
    (["--mesh=fsdp=0"], ["--mesh is fsdp=0, accepted are"]),
    (["--cache=fp8"], ["--cache is 'fp8', accepted are packed and plain."]),
    (["--effort=3"], ["--effort is of an answer in a chat: it needs --chat."]),
    (
      ["--chat", "--effort=0", '--prompt=[{"role": "usr"}]', "--samples=x"],
      [
        "--effort must be from 1 to 100, got 0.",
        "--prompt message 1 has the role 'usr', accepted are system, user, assistant, tool.",
        "--samples must be an integer",
      ],
    ),
  ],
)
def test_every_problem_of_the_arguments_is_one_sentence(words, sentences, capsys):
  assert main(["generate", *words]) == Exit.USAGE
  error = capsys.readouterr().err
  assert all(sentence in error for sentence in sentences)
  assert "Traceback" not in error


@pytest.mark.parametrize(
  ("change", "words", "sentence"),
  [
    (lambda f: shutil.rmtree(f), (), "is no run folder with a complete step, and no step."),
    (lambda f: (f / "config.json").write_text("{"), (), "config.json is no configuration of a run"),
    (lambda f: shutil.rmtree(f / "checkpoints"), (), "is no run folder with a complete step"),
    (lambda f: None, ("--step=3",), "--step is 3, the complete checkpoints of"),
    (lambda f: None, ("--data=nowhere",), "There is no tokenizer: nowhere is no folder"),
    (lambda f: None, ("--mesh=fsdp=16",), "--mesh needs 16 devices, there are 8."),
    (lambda f: damage(f), (), "cannot be used"),
    (lambda f: widen(f), (), "does not fit its config.json"),
    (lambda f: shrink(f), (), "array params/embed is [300, 32] instead of [64, 32]"),
  ],
)
def test_what_is_missing_or_damaged_is_one_sentence(
  change, words, sentence, trained, tmp_path, capsys
):
  folder = shutil.copytree(trained, tmp_path / "run")
  change(folder)
  arguments = ["--checkpoint", str(folder), "--prompt", "a", *words]
  assert main(["generate", *arguments]) == Exit.USAGE
  error = capsys.readouterr().err
  assert sentence in error
  assert "Traceback" not in error


def widen(folder):
  change_model(folder, dim=64)


def shrink(folder):
  change_model(folder, vocab=64)


@pytest.mark.parametrize(("begins", "rounds"), [(256, True), (2000, False)])
def test_a_model_computes_as_in_the_stage_that_took_its_step(begins, rounds, trained, tmp_path):
  """Steps are of 256 tokens, the checkpoint is that of step 7."""
  folder = shutil.copytree(trained, tmp_path / "run")
  config = json.loads((folder / "config.json").read_text())
  changes = {"model.numerics.main_fp4": True}
  config["stages"] = [{"name": "served", "tokens": begins, "changes": changes}]
  (folder / "config.json").write_text(json.dumps(config))
  assert open_model("--checkpoint", str(folder)).cfg.numerics.main_fp4 is rounds


def test_text_that_spells_a_special_token_stays_text(loaded):
  ids = loaded.text.tokenizer.encode("<｜end▁of▁sentence｜>", add_special_tokens=False).ids
  assert loaded.text.prepared.eos not in ids and len(ids) > 1


CHAT = "--chat", '--prompt=[{"role": "user", "content": "router"}]', "--effort=20"


@pytest.mark.slow
def test_an_answer_of_a_chat_is_reasoning_and_then_text(loaded, trained, capsys):
  """Random weights end neither; that is said, and what there is is shown."""
  asked = request(trained, *CHAT)
  encoder = chat_tokenizer(loaded.text.tokenizer)
  (shown, again) = (
    "".join(generate.write(loaded._replace(encoder=encoder), asked)) for _ in range(2)
  )
  assert shown == again and shown.startswith(REASONING)
  assert shown.splitlines()[-1].startswith("[not a whole answer: expected </think>")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
  """The run's checkpoint as a release has it."""
  folder = tmp_path_factory.mktemp("exported") / "released"
  words = ["--checkpoint", str(trained), "--output", str(folder)]
  assert convert.main([*words, "--format", "released", "--dtype", "bfloat16"]) == Exit.DONE
  return folder


def test_a_released_checkpoint_needs_a_tokenizer_that_fits_it(prepared, tmp_path, capsys):
  """Everything that is wrong is said at once."""
  for name in ("config.json", "weights.safetensors"):
    shutil.copy(REFERENCE / "quantized_model" / name, tmp_path)
  words = ["--checkpoint", str(tmp_path), "--prompt=a"]
  assert main(["generate", *words, "--mesh=fsdp=16"]) == Exit.USAGE
  error = capsys.readouterr().err
  assert "--mesh needs 16 devices, there are 8." in error
  assert "names no data: --data must name the tokenizer's." in error
  assert main(["generate", *words, f"--data={prepared.folder}"]) == Exit.USAGE
  assert "has 300 tokens, the model's vocabulary 64." in capsys.readouterr().err
  assert main(["generate", *words, "--step=3"]) == Exit.USAGE
  assert "--step is 3, but --checkpoint" in capsys.readouterr().err


def test_a_tokenizer_without_marks_is_told_which_it_lacks(exported, prepared, capsys):
  words = ["--checkpoint", str(exported), "--prompt=a", f"--data={prepared.folder}"]
  assert main(["generate", *words, "--chat"]) == Exit.USAGE
  names = ", ".join(CHAT_TOKENS)
  assert f"lacks tokens of the chat format: {names};" in capsys.readouterr().err


@pytest.mark.slow
def test_a_released_checkpoint_writes_what_the_run_made_of_it_writes(exported, text_data, tmp_path):
  words = ["--checkpoint", str(exported), "--output", str(tmp_path / "run")]
  assert convert.main([*words, "--format", "checkpoint"]) == Exit.DONE
  texts = []
  for folder in (exported, tmp_path / "run"):
    asked = request(folder, "--data", str(text_data.folder), "--temperature=0")
    texts.append("".join(generate.write(generate.load(asked), asked)))
  assert texts[0] == texts[1] and len(texts[0]) > 3


def test_another_tokenizer_than_that_of_training_is_refused(trained, prepared, capsys):
  words = ["--checkpoint", str(trained), "--prompt=a", "--data", str(prepared.folder)]
  assert main(["generate", *words]) == Exit.USAGE
  assert "was trained with another tokenizer than that in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_chat_on_the_terminal_goes_on_behind_its_answers(loaded):
  """Random weights give no whole answer, so the answers are given; the session is real."""
  encoder = chat_tokenizer(loaded.text.tokenizer)
  asked, session = [], Session(loaded.sampler)
  answers = [["so", Mark.THINK_END, "one", Mark.EOS], ["broken"], ["", Mark.THINK_END, Mark.EOS]]

  def answered(step, behind):
    asked.append(as_text(encoder.decode(session._held)))
    for token in encoder.encode(answers[len(asked) - 1]):
      yield [int(token)]
      assert np.isfinite(step(np.array([token]), np.ones(1, bool))).all()

  lines = ["first", "second", "third"]
  shown = "".join(talk(session, encoder, lines, answered, effort=7, room=20))
  parts = shown.split(REASONING)
  assert parts[1] == f"so{ANSWER}one\n" and "[forgotten]" in parts[2] and len(parts) == 4
  mark = lambda mark, text="": mark.value + text
  question = lambda text: mark(Mark.USER, text) + mark(Mark.ASSISTANT)
  assert asked[0].endswith(question("first") + mark(Mark.THINK))
  assert asked[-1].endswith(
    question("first") + mark(Mark.THINK_END, "one") + mark(Mark.EOS)
    + question("third") + mark(Mark.THINK)
  )  # fmt: skip
